"""What all parts of ddpstats have told of this process so far, in a few short texts: for people who look while it runs.

Alarms (marks of any wing), and what reductions tell of their keys. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpstats._base import marks
from ddpstats._base.marks import Mark
from ddpstats._base.text import ranks_text, shorten
from ddpstats.guard.recording import HeldKeys

if TYPE_CHECKING:
    from ddpstats._reduction.flatten import Structure
    from ddpstats._reduction.layout import Layout

_SHOWN_KEYS = 5
_MOST_NAMES, _MOST_KINDS = 8, 4  # of reductions, of alarms: those that were told of last
_MOST_LINES = 8
_MOST_SITES = 1024  # of reductions
_TEXT_CHARS = 1000
_TEXT_BYTES = 6000  # as JSON: a text may be nothing but escapes


class Tidings:
    """From `subscribe` until `close`. ``changed`` is called after each change, in the thread that told of it."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.renegotiations = 0
        self.new_keys = ""
        self._alarms: dict[str, str] = {}  # kind -> the last one's text
        self._held: dict[tuple[str, str, str | None], HeldKeys] = {}  # by the site of a reduction
        self._not_held: dict[str | None, str] = {}  # name of a reduction -> keys
        self._changed = changed

    def subscribe(self) -> None:
        marks.finding_listeners.append(self._found)
        marks.key_listeners.append(self)

    def close(self) -> None:
        marks.finding_listeners.remove(self._found)
        marks.key_listeners.remove(self)

    def renegotiated(self, name: str | None, new_keys: Sequence[str]) -> None:
        """The ranks have exchanged what they hold in a reduction of that name."""
        self.renegotiations += 1
        self.new_keys = clipped(f"{_some(new_keys) or 'none'} (name={name!r})")
        self._changed()

    def reduced(self, site: tuple[str, str, str | None], structure: Structure, layout: Layout) -> None:
        """Note one call of a reduction, and what this rank held in it."""
        if len(self._held) > _MOST_SITES:
            self._held.clear()
        keys = self._held.setdefault(site, HeldKeys()).take(structure, layout)
        if keys is not None:
            self.stopped_holding(site[2], keys)

    def stopped_holding(self, name: str | None, keys: Sequence[str]) -> None:
        """Note all that this rank held once in reductions of that name, and does not hold any more."""
        self._not_held.pop(name, None)
        if keys:
            self._not_held[name] = f"{_some(keys)} (name={name!r})"
            _keep_newest(self._not_held, _MOST_NAMES)
        self._changed()

    def alarm(self, kind: str, message: str) -> None:
        """Something is wrong; the last of a kind counts."""
        self._alarms.pop(kind, None)
        self._alarms[kind] = message
        _keep_newest(self._alarms, _MOST_KINDS)
        self._changed()

    def _found(self, mark: Mark) -> None:
        self.alarm(mark.kind, mark.text)

    @property
    def alarms(self) -> list[str]:
        return [clipped(" ".join(text.split())) for text in list(self._alarms.values())]

    @property
    def not_held(self) -> str:
        return clipped("; ".join(list(self._not_held.values())))


def not_held_lines(of_ranks: Mapping[int, str]) -> list[str]:
    """``of_ranks``: rank -> what its `Tidings.not_held` is. Ranks that say the same share a line; no rank has two."""
    by_text: dict[str, list[int]] = {}
    for rank, not_held in of_ranks.items():
        if not_held:
            by_text.setdefault(not_held, []).append(rank)
    lines = [f"not held any more by {ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], "and other keys by other ranks"]


def _some(keys: Sequence[str]) -> str:
    return shorten(map(repr, keys), _SHOWN_KEYS)


def _keep_newest(texts: dict[Any, Any], most: int) -> None:
    while len(texts) > most:
        del texts[next(iter(texts))]


def clipped(text: str) -> str:
    """As much of it as has room in a note."""
    text = text[:_TEXT_CHARS]
    while len(json.dumps(text)) > _TEXT_BYTES:
        text = text[: len(text) // 2]
    return text
