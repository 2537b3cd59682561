"""What a part of ddpstats found or measured, told to whoever keeps a record of the run; to nobody by default.

The parts that tell, and the one that writes, do not know each other: both know this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpstats._base.files import LATEST_TIME_SEC

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Mark:
    """Something that happened on the ranks, besides their collectives.

    Attributes:
        kind: "sentinel", "nonfinite", "overflow", ...; "values" for what one rank put into a reduction.
        text: for people; of "values" the name of the reduction.
        time: seconds since 1970.
        step: of the training; None where it is not known.
        ranks: global ranks that it is about, ascending; empty where that cannot be told.
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
        told = {"step": self.step, "ranks": list(self.ranks), "text": self.text, "values": values}
        return {"mark": self.kind, "time": self.time, **{key: held for key, held in told.items() if held or held == 0}}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Mark:
        """Raises ValueError for what `as_dict` did not write."""
        kind, text, step = given.get("mark"), given.get("text", ""), given.get("step")
        when: Any = given.get("time")
        ranks, values = given.get("ranks", []), given.get("values", {})
        if not isinstance(kind, str) or not isinstance(text, str) or not isinstance(values, dict):
            raise ValueError("a mark without kind, text or values")
        if type(when) not in (int, float) or not 0 <= when < LATEST_TIME_SEC or type(step) not in (int, type(None)):
            raise ValueError("a mark without time or step")
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ValueError("a mark of no ranks")
        return cls(
            kind, text, float(when), step, tuple(ranks), {name: _number(value) for name, value in values.items()}
        )


VALUES = "values"  # the kind of mark that holds what a rank put into a reduction

Listener = Callable[[Mark], None]
listeners: list[Listener] = []
finding_listeners: list[Listener] = []
"""Are told of what was found, and not of values, which nobody need then work out."""


def tell(kind: str, text: str = "", **known: Any) -> None:
    """Hand a mark of now to every listener. ``known``: the other fields of `Mark`. Local; nothing waits."""
    told = listeners if kind == VALUES else [*listeners, *finding_listeners]
    for listener in tuple(told):
        listener(Mark(kind, text, time.time(), **known))


def _finite_or_word(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if (type(value) is float and math.isfinite(value)) or (type(value) in (int, bool) and abs(value) < 1 << 1000):
        return float(value)
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise ValueError("a mark whose value is no number")
