"""The statistics of a tensor: one table, by which they are recorded, read, compared and described.

A new statistic is one row, behind the others. Its ``measure`` makes the number; the first seven are measured together,
in few passes over the memory (`record/leaves.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "infinity": math.inf, "-infinity": -math.inf}

ComparisonRule = Literal["relative", "equal"]


def read_number(value: Any) -> float | None:
    """Return a number as a float: JSON's NaN and Infinity, the words for them, a bool, null. Raises ValueError."""
    if value is None or type(value) is float:
        return value
    if isinstance(value, (int, bool)):
        return float(value) if abs(value) < 1 << 1000 else (math.inf if value > 0 else -math.inf)
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if value in ("N/A", "None", "null"):
        return None
    raise ValueError(f"{value!r} is not a number")


def read_count(value: Any) -> int | None:
    """Return a whole number, or None. Raises ValueError."""
    if value is None or type(value) is int:
        return value
    raise ValueError(f"{value!r} is not a whole number")


def read_index(value: Any) -> list[int] | None:
    """Return the index of an element, or None. Raises ValueError."""
    if value is None or (isinstance(value, list) and all(type(part) is int for part in value)):
        return value
    raise ValueError(f"{value!r} is not a list of whole numbers")


def read_text(value: Any) -> str | None:
    """Return a string, or None. Raises ValueError."""
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not a string")


@dataclass(frozen=True)
class Statistic:
    """A statistic of a tensor.

    Attributes:
        key: of a leaf in dump.json.
        read: converts what JSON has; it raises ValueError for what cannot be such a statistic.
        compared: by its relative error, or whether it is equal; where both sides have it.
        shown: how a sentence says it: a format of the value.
        measure: makes the number of a tensor of real elements, in float32 or wider, on the tensor's device: a tensor of
            one element, for which nothing waits. None where it is measured together with others.
    """

    key: str
    read: Callable[[Any], Any] = read_number
    compared: ComparisonRule = "relative"
    shown: str = ""
    measure: Callable[[Tensor], Tensor] | None = None

    def text(self, leaf: Mapping[str, Any]) -> str:
        """Return what a sentence says of it; empty where a leaf has none, or nothing was counted."""
        value = self.read(leaf.get(self.key))
        if value is None or (self.read is read_count and not value):
            return ""
        return (self.shown or f"{self.key} {{:.4g}}").format(value)


STATISTICS = [
    Statistic("Max"),
    Statistic("Min"),
    Statistic("Mean"),
    Statistic("Norm"),
    Statistic("nan_count", read_count, "equal", "{:,} NaN"),
    Statistic("inf_count", read_count, "equal", "{:,} infinite"),
    Statistic("first_bad", read_index, "equal", "first at {}"),
]


def statistic_keys(compared: ComparisonRule | None = None) -> tuple[str, ...]:
    """Return the keys of all statistics, or of those that are compared in one way."""
    return tuple([row.key for row in STATISTICS if compared is None or row.compared == compared])
