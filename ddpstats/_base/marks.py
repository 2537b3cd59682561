"""Marks: what one room of ddpstats found or measured, published to whichever room keeps a record of the run.

The publishing and the recording rooms do not know each other; both know this module. Without a listener a mark is lost.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpstats._base.files import LATEST_TIME_SEC


@dataclass(frozen=True)
class Mark:
    """Something that happened on the ranks, besides their collectives.

    Attributes:
        kind: "sentinel", "nonfinite", "overflow", ...; "values" for what one rank put into a reduction.
        text: for people; of "values" the name of the reduction.
        time: seconds since 1970.
        step: of the training; None where it is not known.
        ranks: global ranks that it is about, ascending; empty where they are not known.
        values: path -> this rank's value; None where it lacks the path, or holds None.
    """

    kind: str
    text: str = ""
    time: float = 0.0
    step: int | None = None
    ranks: tuple[int, ...] = ()
    values: Mapping[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        values = {name: _finite_or_word(value) for name, value in self.values.items()}
        optional = {"step": self.step, "ranks": list(self.ranks), "text": self.text, "values": values}
        held = {key: value for key, value in optional.items() if value or value == 0}
        return {"mark": self.kind, "time": self.time, **held}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Mark:
        """Read what `as_dict` wrote. Raises ValueError for anything that it does not write."""
        kind, text, step = content.get("mark"), content.get("text", ""), content.get("step")
        when: Any = content.get("time")
        ranks, values = content.get("ranks", []), content.get("values", {})
        if not isinstance(kind, str) or not isinstance(text, str) or not isinstance(values, dict):
            raise ValueError("a mark without kind, text or values")
        if type(when) not in (int, float) or not 0 <= when < LATEST_TIME_SEC or type(step) not in (int, type(None)):
            raise ValueError("a mark without time or step")
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError("a mark without ranks")
        read_values = {name: _read_number(value) for name, value in values.items()}
        return cls(kind, text, float(when), step, tuple(ranks), read_values)


VALUES = "values"  # the kind of mark that holds what a rank put into a reduction

Listener = Callable[[Mark], None]
listeners: list[Listener] = []
finding_listeners: list[Listener] = []
"""Called with findings alone: without other listeners, values need not be computed."""


def publish(kind: str, text: str = "", **known: Any) -> None:
    """Hand a mark of now to every listener. ``known``: the other fields of `Mark`. Local; nothing waits."""
    called = listeners if kind == VALUES else [*listeners, *finding_listeners]
    for listener in tuple(called):
        listener(Mark(kind, text, time.time(), **known))


def _finite_or_word(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _read_number(value: Any) -> float | None:
    if value is None:
        return None
    if value in ("nan", "inf", "-inf") or (type(value) in (float, int, bool) and abs(value) <= sys.float_info.max):
        return float(value)
    raise ValueError("a mark whose value is no number")


class KeyListener(Protocol):
    """Is called with keys of reductions, by their names. Local; must neither wait nor raise."""

    def renegotiated(self, name: str | None, new_keys: Sequence[str]) -> None:
        """All ranks have a new layout. ``new_keys``: paths that the one before lacked."""

    def reduced(self, name: str | None, structure: Any, layout: Any) -> None:
        """One call has ended. ``structure``: what this rank held in it; ``layout``: what the ranks have agreed on."""


key_listeners: list[KeyListener] = []
