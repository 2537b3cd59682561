"""A page of the guard's in torch's debug server (``torch.distributed.debug``): labels, differences, where ranks wait.

1. Every rank adds an endpoint to torch's own server of that rank: its status in each group,
   and what has been told there since `debug_handler` was called: alarms, and keys that the rank holds no more.
2. Rank 0's server of pages asks all ranks for that, and finds the differences as the guard does.

The page is plain text in torch's frame; what torch dumps now and then (``dump_dir``) is the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ddpstats._base.files import parse_json
from ddpstats._base.text import printable
from ddpstats._observe.torch_groups import add_debug_endpoint, ask_debug_endpoint
from ddpstats.guard import guard
from ddpstats.guard.diagnosis import find
from ddpstats.guard.status import DOUBT, MISMATCH, RankStatus
from ddpstats.guard.tidings import Tidings, not_held_lines

_ENDPOINT = "ddpstats"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}ddpstats{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""


def debug_handler() -> GuardPage:
    """The guard's page, for ``torch.distributed.debug.start_debug_server(handlers=[..., debug_handler()])``.

    To be called on all ranks. The page shows what the `collective_guard` that is active when somebody looks has seen,
    and from this call on alarms of capture and sentinel, and keys that a rank has stopped holding in our reductions.
    Raises `ConfigError` on a torch that has no such server.
    """
    add_debug_endpoint(_ENDPOINT, _answer)
    global _tidings
    if _tidings is None:
        _tidings = Tidings()
        _tidings.subscribe()
    return GuardPage()


_tidings: Tidings | None = None


def _answer() -> str:
    told = _tidings or Tidings()
    return json.dumps({"groups": guard.statuses(), "not_held": told.not_held, "alarms": told.alarms})


class _Answer(NamedTuple):
    """Of one rank. ``groups``: name -> words for it, and a `RankStatus` that is packed."""

    groups: Mapping[str, tuple[str, bytes]] = MappingProxyType({})
    not_held: str = ""
    alarms: tuple[str, ...] = ()


class _Route(NamedTuple):
    path: str
    handler: Callable[[Any], bytes]


class _Link(NamedTuple):
    path: str
    label: str


class GuardPage:
    """What torch calls a `DebugHandler`; its class is in a private module, and needs libraries that torch does not."""

    fetch_timeout = 60.0  # set by torch

    def routes(self) -> list[_Route]:
        return [_Route("/ddpstats", self._page)]

    def nav_links(self) -> list[_Link]:
        return [_Link("/ddpstats", "ddpstats")]

    def templates(self) -> dict[str, str]:
        return {"ddpstats.html": _TEMPLATE}

    def dump(self) -> str:
        return page_text(ask_debug_endpoint(_ENDPOINT, self.fetch_timeout))

    def dump_filename(self) -> str:
        return "ddpstats"

    def _page(self, request: Any) -> bytes:
        page: bytes = request.frontend.render_template("ddpstats.html", text=self.dump())
        return page


def page_text(answers: list[tuple[bool, str]]) -> str:
    """``answers``: of each rank, by rank, whether it answered, and what."""
    lines: list[str] = []
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    told = [_read(text) if is_there else _Answer() for is_there, text in answers]
    for rank, (is_there, _) in enumerate(answers):
        lines.append(f"rank {rank}: {'no guard is active' if is_there else 'does not answer'}")
        for name, (words, packed) in told[rank].groups.items():
            status = RankStatus.unpack(packed, rank)
            groups.setdefault((name, words), []).append(status)
            lines[-1] = f"rank {rank}: {_doing(status)}"
    remarks = not_held_lines({rank: answer.not_held for rank, answer in enumerate(told)})
    remarks += [f"ALARM: {alarm}" for alarm in dict.fromkeys(alarm for answer in told for alarm in answer.alarms)]
    lines += ["", *remarks] if remarks else []
    for (name, words), found in groups.items():
        finding = find(name, words, found)
        waited = any(status.waits_in is not None for status in found)
        if finding is not None and (waited or finding.kind in (MISMATCH, DOUBT)):  # else a rank is a moment behind
            lines += ["", *finding.message.splitlines()]
    return printable(lines)


def _doing(status: RankStatus) -> str:
    last = f"last: {status.last}" if status.last else "no collective yet"
    if status.waits_in is not None:
        return f"waits in number {status.waits_in[1]} of group {status.waits_in[0]!r}; {last}"
    return f"{status.left or 'is elsewhere in its program'}; {last}"


def _read(text: str) -> _Answer:
    """Empty for what `debug_handler` did not write."""
    try:
        given = parse_json(text)
        groups = {str(name): (str(words), str(status).encode()) for name, (words, status) in given["groups"].items()}
        return _Answer(groups, str(given["not_held"]), tuple(map(str, given["alarms"])))
    except (ValueError, LookupError, TypeError, AttributeError):
        return _Answer()
