"""One path's value on each rank, and what it says of the ranks: who is smallest, who is farthest from the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from ddpstats.errors import ConfigError

_LARGE = 2.0**900  # sums of values up to here are finite in float64, for as many ranks as a group may have


@dataclass(frozen=True)
class RankValues:
    """What each rank held under one path, before it was reduced. The same on every rank, to the bit.

    Infinities and NaN are left out of `median` and `std`; NaN is neither smallest nor largest.

    Attributes:
        values: one per rank, in the order of the group: what the reduction of that rank alone would give, so the very
            value that it passed, as a float64 (bool for Any and All); of a 1-d leaf its weighted mean, or what its
            marker makes of it. None where the rank takes no part in the path's value: it lacks the path, holds None or
            weight 0 there, or ``nonfinite="skip"`` left it out.
        ranks: the global ranks, in the same order.
    """

    values: tuple[float | bool | None, ...]
    ranks: tuple[int, ...]

    @property
    def min_rank(self) -> int | None:
        """The global rank with the smallest value, the first of several; None where no rank has one."""
        return min(self._ordered, key=lambda pair: pair[1], default=(None, 0.0))[0]

    @property
    def max_rank(self) -> int | None:
        """The global rank with the largest value, the first of several; None where no rank has one."""
        return max(self._ordered, key=lambda pair: pair[1], default=(None, 0.0))[0]

    @cached_property
    def median(self) -> float:
        """Of the finite values; of an even number of them the middle of the inner two. NaN where there are none."""
        if not self._finite:
            return math.nan
        return median(value / 2 for value in self._finite) * 2 if self._are_large else float(median(self._finite))

    @cached_property
    def std(self) -> float:
        """The population standard deviation of the finite values: 0.0 where all are equal, NaN where there are none."""
        if not self._finite:
            return math.nan
        # Differences from the median are exact where values lie close together; what is left of the mean is small.
        scale = 2.0**200 if self._are_large else 1.0
        shifted = [value / scale - self.median / scale for value in self._finite]
        mean = math.fsum(shifted) / len(shifted)
        return math.hypot(*(value - mean for value in shifted)) / math.sqrt(len(shifted)) * scale

    def worst(self, k: int = 1) -> tuple[tuple[int, float | bool], ...]:
        """The ``k`` ranks farthest from the median, as (global rank, value): the farthest first, equals in rank order.

        NaN and infinities are farther than everything else. Fewer than ``k`` where fewer ranks have a value.
        Raises ConfigError where ``k`` is negative.
        """
        if k < 0:
            raise ConfigError(f"k={k!r} must be a number of ranks, 0 or more")
        return tuple(sorted(self._held, key=lambda pair: -self._distance(pair[1]))[:k])

    @property
    def _held(self) -> list[tuple[int, float | bool]]:
        return [(rank, value) for rank, value in zip(self.ranks, self.values, strict=True) if value is not None]

    @property
    def _ordered(self) -> list[tuple[int, float | bool]]:
        return [(rank, value) for rank, value in self._held if value == value]

    @cached_property
    def _finite(self) -> list[float]:
        return [float(value) for value in self.values if value is not None and math.isfinite(value)]

    @cached_property
    def _are_large(self) -> bool:
        return max(map(abs, self._finite)) > _LARGE

    def _distance(self, value: float) -> float:
        return abs(value - self.median) if math.isfinite(value) else math.inf
