"""The result of one reduction, and what each rank held under a path."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from statistics import median, pstdev
from typing import Any, NamedTuple

from ddpstats._base.text import ranks_text
from ddpstats._reduction.layout import Layout, Selection
from ddpstats._reduction.ops import OPS
from ddpstats.errors import ConfigError, NonFiniteStat

_SHOWN_PATHS = 10


class Entry(NamedTuple):
    """One path of a result.

    Attributes:
        value: the reduced value; bool for Any and All, None where every rank that has the path holds None.
        weight: the total weight of a mean; the number of ranks that took part for every other op.
        present_ranks: how many ranks held a value.
        nonfinite_ranks: how many ranks held a NaN or an infinity.
        op: "mean", "sum", "min", "max", "any", "all"; "none" where only None was ever seen.
    """

    value: float | bool | None
    weight: float
    present_ranks: int
    nonfinite_ranks: int
    op: str


@dataclass(frozen=True)
class RankValues:
    """The value that each rank held under one path, before it was reduced. The same on every rank, to the bit.

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
        """The median of the finite values; of an even number the middle of the inner two. NaN if no rank has one."""
        return float(median(self._finite)) if self._finite else math.nan

    @cached_property
    def std(self) -> float:
        """The population standard deviation of the finite values: 0.0 where all are equal, NaN if no rank has one."""
        return pstdev(self._finite) if self._finite else math.nan

    def worst(self, k: int = 1) -> tuple[tuple[int, float | bool], ...]:
        """The ``k`` ranks farthest from the median, as (global rank, value): the farthest first, equals in rank order.

        NaN and infinities are farther than all other values. Fewer than ``k`` where fewer ranks have a value.
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

    def _distance(self, value: float) -> float:
        return abs(value - self.median) if math.isfinite(value) else math.inf


@dataclass(frozen=True)
class Columns:
    """All ranks' values, slot by slot: what ``per_rank=True`` adds; ``ranks`` are global ranks."""

    ranks: Sequence[int]
    values: Sequence[array[float]]
    is_held: Sequence[bytes]

    def row(self, slot: int, op: str) -> RankValues:
        """Return every rank's value in one slot; None where it has none."""
        held = [values[slot] if has[slot] else None for values, has in zip(self.values, self.is_held, strict=True)]
        row = [bool(value) if value is not None and OPS[op].is_flag else value for value in held]
        return RankValues(tuple(row), tuple(map(int, self.ranks)))


@dataclass(frozen=True, eq=False)
class Reduced:
    """The result of `reduce_stats`: the union of the paths of this call, the same on every rank, to the bit.

    Results hold dicts, lists and tuples only: a list or a tuple where every rank that has the container agrees,
    otherwise a list; a dict for any mapping, namedtuple or dataclass.

    Attributes:
        values: nested like the stats; Python floats, bool for Any and All, None for a path that is None wherever it is.
        weights: the same structure; the weight of each value. 0 where the value is None or has none.
        present_ranks: the same structure; how many ranks held a value.
        nonfinite_ranks: the same structure; how many ranks held a NaN or an infinity.
        by_rank: the same structure; a `RankValues` per path. None where the call did not ask for it (``per_rank``).
        total_weight: the plain sum of the weights that the ranks passed.
    """

    total_weight: float
    _selection: Selection
    _flat: Sequence[float | bool | None]
    _weights: array[float] | None
    _world_size: int
    _columns: Columns | None = None

    def __repr__(self) -> str:
        return f"Reduced(values={self.values!r}, total_weight={self.total_weight!r})"

    @cached_property
    def values(self) -> Any:
        return self._selection.build(iter(self._flat))

    @cached_property
    def weights(self) -> Any:
        return self._selection.build(repeat(self.total_weight) if self._weights is None else iter(self._weights))

    @cached_property
    def present_ranks(self) -> Any:
        present = self._selection.present
        return self._selection.build(repeat(self._world_size) if present is None else iter(present))

    @cached_property
    def nonfinite_ranks(self) -> Any:
        nonfinite = self._selection.nonfinite
        return self._selection.build(repeat(0) if nonfinite is None else iter(nonfinite))

    @cached_property
    def by_rank(self) -> Any:
        return None if self._columns is None else self._selection.build(self._rows(self._columns))

    def flat(self, *, per_rank: bool = False) -> dict[str, float]:
        """Name to value for loggers: ``loss``, ``a/b``, ``l1_loss[0]``. Flags are 1.0 or 0.0, None is left out.

        With ``per_rank`` also ``loss/min``, ``loss/max``, ``loss/min_rank`` and ``loss/max_rank`` of each path that
        some rank has a number for (not NaN). Raises ConfigError where the call did not ask for ``per_rank``, or where
        a path has such a name already.
        """
        flat = {name: float(value) for name, value in zip(self._names(), self._flat, strict=True) if value is not None}
        if not per_rank:
            return flat
        extremes = self._extremes()
        taken = sorted(extremes.keys() & flat.keys())
        if taken:
            raise ConfigError(f"per_rank=True would give {taken[0]!r} twice, since a path has that name: rename it")
        return {**flat, **extremes}

    def _extremes(self) -> dict[str, float]:
        if self._columns is None:
            raise ConfigError("nothing is known of single ranks: reduce with per_rank=True")
        extremes: dict[str, float] = {}
        for name, row in self.flat_by_rank().items():
            held = dict(row._ordered)
            if held:
                least, largest = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
                extremes |= {f"{name}/min": float(held[least]), f"{name}/min_rank": float(least)}
                extremes |= {f"{name}/max": float(held[largest]), f"{name}/max_rank": float(largest)}
        return extremes

    def flat_by_rank(self) -> dict[str, RankValues]:
        """`by_rank` by the names of `flat`, with those of None; empty where the call did not ask for it."""
        return {} if self._columns is None else dict(zip(self._names(), self._rows(self._columns), strict=True))

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Every path, spelled as in `flat`, with all that is known of it; in the order of the values."""
        selection, count = self._selection, len(self._flat)
        weights = [self.total_weight] * count if self._weights is None else self._weights
        present = [self._world_size] * count if selection.present is None else selection.present
        nonfinite = [0] * count if selection.nonfinite is None else selection.nonfinite
        rows = map(Entry, self._flat, weights, present, nonfinite, selection.ops)
        return iter(list(zip(self._names(), rows, strict=True)))

    def _rows(self, columns: Columns) -> Iterator[RankValues]:
        return map(columns.row, self._selection.slots, self._selection.ops)

    def _names(self) -> list[str]:
        names = self._selection.layout.names
        return [names[slot] for slot in self._selection.slots]


def nonfinite_error(
    layout: Layout, held: Iterable[tuple[Sequence[int], Sequence[int]]], group_name: str
) -> NonFiniteStat:
    """Return the error for slots that are not finite; ``held``: such slots, and on which ranks."""
    ranks_of: dict[int, list[int]] = {}
    for bad_slots, ranks in held:
        for slot in bad_slots:
            ranks_of.setdefault(slot, []).extend(ranks)
    names = layout.names
    lines = [f"non-finite stats (nonfinite='raise') on {group_name}:"]
    lines += [f"  {names[slot]!r}: {ranks_text(ranks)}" for slot, ranks in sorted(ranks_of.items())[:_SHOWN_PATHS]]
    if len(ranks_of) > _SHOWN_PATHS:
        lines.append(f"  and {len(ranks_of) - _SHOWN_PATHS} more paths")
    involved = {rank for ranks in ranks_of.values() for rank in ranks}
    first = names[min(ranks_of)] if ranks_of else None
    return NonFiniteStat("\n".join(lines), ranks=involved, path=first, group=group_name)
