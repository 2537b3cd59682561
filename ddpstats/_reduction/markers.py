"""How one leaf is combined over ranks: the markers a user wraps around a value.

A bare leaf is ``Mean`` with the weight of the call.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

ReduceOp = Literal["mean", "sum", "min", "max", "any", "all"]


@dataclass(frozen=True, slots=True)
class Marker:
    """Base of the leaf markers; ``op`` is the reduce op that the marker stands for."""

    value: typing.Any
    op: ClassVar[ReduceOp] = "mean"


@dataclass(frozen=True, slots=True)
class Mean(Marker):
    """Weighted mean over ranks, with a weight of its own where ``weight`` is given (tokens, frames).

    ``weight``: a number >= 0, or a 1-d tensor of the length of ``value``; None means the weight of the call.
    """

    weight: typing.Any = None
    op: ClassVar[ReduceOp] = "mean"


@dataclass(frozen=True, slots=True)
class Sum(Marker):
    """Plain sum over the ranks that hold the path; the weight of the call plays no part."""

    op: ClassVar[ReduceOp] = "sum"


@dataclass(frozen=True, slots=True)
class Min(Marker):
    """Smallest value over the ranks that hold the path."""

    op: ClassVar[ReduceOp] = "min"


@dataclass(frozen=True, slots=True)
class Max(Marker):
    """Largest value over the ranks that hold the path."""

    op: ClassVar[ReduceOp] = "max"


@dataclass(frozen=True, slots=True)
class Any(Marker):
    """True where some rank's flag is true. The flag is a bool, 0 or 1."""

    op: ClassVar[ReduceOp] = "any"


@dataclass(frozen=True, slots=True)
class All(Marker):
    """True where the flag of every rank that holds the path is true. The flag is a bool, 0 or 1."""

    op: ClassVar[ReduceOp] = "all"
