"""The ways to combine a leaf over its elements, over the adds of a window and over ranks.

A user wraps a value in a `Marker`; its class names an `Op`, which holds all that is particular about it. So a new
marker is one `Op` and one class. A bare leaf is a `Mean` with the weight of the call.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

Fold = Literal["sum", "min", "max"]


def identity(value: typing.Any) -> typing.Any:
    """Return ``value``: the default of `Op.prepare`."""
    return value


@dataclass(frozen=True, eq=False)
class Op:
    """One way to combine a leaf. All ranks must have registered an op before some rank sends it.

    Attributes:
        name: as other ranks and `Entry.op` spell it.
        finish: (total, weight) -> value; the weight is positive. Of an op other than the mean, the weight is the number
            of adds that hold the leaf, over all ranks.
        prepare: applied to each element first, a float; ``lambda x: x * x`` for a sum of squares.
        elements: how the elements of a 1-d leaf are folded; unused where ``is_weighted``.
        over: how adds and ranks are folded. "min" and "max" need a second collective.
        is_weighted: whether an element is multiplied by its weight, as in a mean.
        is_flag: whether each element must be 0 or 1.
    """

    name: str
    finish: Callable[[float, float], float | bool]
    prepare: Callable[[typing.Any], typing.Any] = identity
    elements: Fold = "sum"
    over: Fold = "sum"
    is_weighted: bool = False
    is_flag: bool = False

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return _find_op, (self.name,)


# Every op by its name.
OPS: dict[str, Op] = {}


def _find_op(name: str) -> Op:
    return OPS[name]


def _total(total: float, weight: float) -> float:
    return total


MEAN = Op("mean", lambda total, weight: total / weight, is_weighted=True)
SUM = Op("sum", _total)
MIN = Op("min", _total, elements="min", over="min")
MAX = Op("max", _total, elements="max", over="max")
ANY = Op("any", lambda total, weight: total > 0, elements="max", is_flag=True)
ALL = Op("all", lambda total, weight: total == weight, elements="min", is_flag=True)
# Of a leaf that is None: it has no value, and no weight.
NONE = Op("none", lambda total, weight: math.nan)


@dataclass(frozen=True, slots=True)
class Marker:
    """Base of the leaf markers."""

    value: typing.Any
    op: ClassVar[Op] = MEAN


@dataclass(frozen=True, slots=True)
class Mean(Marker):
    """Weighted mean over ranks, with the given ``weight`` in place of the call's (tokens, frames).

    ``weight``: a number >= 0, or a 1-d tensor of the length of ``value``; None means the weight of the call.
    """

    weight: typing.Any = None
    op: ClassVar[Op] = MEAN


@dataclass(frozen=True, slots=True)
class Sum(Marker):
    """Plain sum over the ranks that hold the path; the weight of the call plays no part."""

    op: ClassVar[Op] = SUM


@dataclass(frozen=True, slots=True)
class Min(Marker):
    """Smallest value over the ranks that hold the path."""

    op: ClassVar[Op] = MIN


@dataclass(frozen=True, slots=True)
class Max(Marker):
    """Largest value over the ranks that hold the path."""

    op: ClassVar[Op] = MAX


@dataclass(frozen=True, slots=True)
class Any(Marker):
    """True where some rank's flag is true. The flag is a bool, 0 or 1."""

    op: ClassVar[Op] = ANY


@dataclass(frozen=True, slots=True)
class All(Marker):
    """True where the flag of every rank that holds the path is true. The flag is a bool, 0 or 1."""

    op: ClassVar[Op] = ALL


MARKERS = "Mean, Sum, Min, Max, Any, All"  # in messages
