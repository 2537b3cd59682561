"""The result of one reduction, or the error about its numbers, which every rank raises alike."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

from ddpstats._base.text import ranks_text
from ddpstats._reduction.columns import Columns
from ddpstats._reduction.layout import Layout, Selection
from ddpstats._reduction.nesting import Builder, builder
from ddpstats._reduction.rank_values import RankValues
from ddpstats._reduction.schema import leaf_nodes
from ddpstats.errors import InvalidStats, NonFiniteStat

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


@dataclass(frozen=True, eq=False)
class Reduced:
    """What `reduce_stats` returns: the union of the paths of this call, the same on every rank, to the bit.

    Attributes:
        values: nested like the stats; Python floats, bool for Any and All, None for a path that is None wherever it is.
        weights: the same structure; the weight each value stands for. 0 where the value is None or has none.
        present_ranks: the same structure; how many ranks held a value.
        nonfinite_ranks: the same structure; how many ranks held a NaN or an infinity.
        by_rank: the same structure; a `RankValues` per path. None where the call did not ask for it (``per_rank``).
        total_weight: the plain sum of the weights that the ranks passed.
    """

    total_weight: float
    _layout: Layout
    _selection: Selection
    _flat: Sequence[float | bool | None]
    _weights: array[float] | None
    _world_size: int
    _build: Builder
    _columns: Columns | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_build"}  # made of closures

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _build=builder(state["_selection"].schema))

    def __repr__(self) -> str:
        return f"Reduced(values={self.values!r}, total_weight={self.total_weight!r})"

    @cached_property
    def values(self) -> Any:
        return self._build(iter(self._flat))

    @cached_property
    def weights(self) -> Any:
        return self._build(repeat(self.total_weight) if self._weights is None else iter(self._weights))

    @cached_property
    def present_ranks(self) -> Any:
        present = self._selection.present
        return self._build(repeat(self._world_size) if present is None else iter(present))

    @cached_property
    def nonfinite_ranks(self) -> Any:
        nonfinite = self._selection.nonfinite
        return self._build(repeat(0) if nonfinite is None else iter(nonfinite))

    @cached_property
    def by_rank(self) -> Any:
        return None if self._columns is None else self._build(iter(self._rank_values(self._columns)))

    def flat(self) -> dict[str, float]:
        """Name to value for loggers: ``loss``, ``a/b``, ``l1_loss[0]``. Flags are 1.0 or 0.0, None is left out."""
        return {name: float(value) for name, value in zip(self._names(), self._flat, strict=True) if value is not None}

    def flat_by_rank(self) -> dict[str, RankValues]:
        """`by_rank` by the names of `flat`, with those of None; empty where the call did not ask for it."""
        return {} if self._columns is None else dict(zip(self._names(), self._rank_values(self._columns), strict=True))

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Every path, spelled as in `flat`, with all that is known of it; in the order of the values."""
        selection, count = self._selection, len(self._flat)
        weights = [self.total_weight] * count if self._weights is None else self._weights
        present = [self._world_size] * count if selection.present is None else selection.present
        nonfinite = [0] * count if selection.nonfinite is None else selection.nonfinite
        ops = [found.op for found in leaf_nodes(selection.schema)]
        rows = map(Entry, self._flat, weights, present, nonfinite, ops)
        return iter(list(zip(self._names(), rows, strict=True)))

    def _rank_values(self, columns: Columns) -> list[RankValues]:
        found: list[RankValues] = []
        for slot, leaf in zip(self._selection.slots, leaf_nodes(self._selection.schema), strict=True):
            values = columns.row(slot)
            flags = [None if value is None else bool(value) for value in values] if leaf.op in ("any", "all") else None
            found.append(RankValues(tuple(values if flags is None else flags), columns.ranks))
        return found

    def _names(self) -> list[str]:
        names = self._layout.names
        return [names[slot] for slot in self._selection.slots]


def overflown(selection: Selection, means: Sequence[float], weights: float | array[float], skip: bool) -> list[int]:
    """Which leaves' ``means`` are not finite although every value in them is: a sum was too large for a float64.

    ``skip``: values that are not finite were left out.
    """
    nonfinite = None if skip else selection.nonfinite
    return [
        position
        for position, mean in enumerate(means)
        if not math.isfinite(mean)
        and (weights if isinstance(weights, float) else weights[position])
        and not (nonfinite and nonfinite[position])
    ]


def finish(
    layout: Layout,
    selection: Selection,
    means: array[float],
    sums: array[float],
    weights: float | array[float],
    extremes: dict[int, float],
) -> MutableSequence[Any]:
    """The values of a result from what was summed; ``means`` are those of leaves that are means.

    All are per leaf of the selection; ``extremes`` is slot -> minimum or maximum.
    """
    if not layout.specials and not selection.nones:
        return means
    values: list[float | bool | None] = list(means)
    if layout.specials:
        _apply_ops(layout, selection, values, sums, weights, extremes)
    for position in selection.nones:
        values[position] = None
    return values


def _apply_ops(
    layout: Layout,
    selection: Selection,
    values: list[float | bool | None],
    sums: Sequence[float],
    weights: float | array[float],
    extremes: dict[int, float],
) -> None:
    for slot, op in layout.specials:
        position = selection.position_of.get(slot)
        if position is None:
            continue
        total, weight = sums[position], weights if isinstance(weights, float) else weights[position]
        if weight == 0:  # every rank that holds it was left out as non-finite, or holds None
            values[position] = math.nan
        elif op == "sum":
            values[position] = total
        elif op in ("any", "all"):
            values[position] = total > 0 if op == "any" else total == weight
        elif op in ("min", "max"):
            # The sum is NaN exactly where some rank's value is: a backend's own answer depends on the order of ranks.
            values[position] = math.nan if math.isnan(total) else extremes[slot]


# -- errors -----------------------------------------------------------------------------------------------------------


def overflow_error(path: str, ranks: Sequence[int], group_name: str) -> InvalidStats:
    """``path``: the first whose sum over ranks no float64 can hold."""
    return InvalidStats(
        f"the sum over ranks of {path!r}, values times weights, is too large for a float64 on {group_name}.\n"
        "Use weights closer to 1, or reduce fewer paths at once: then it is computed exactly.",
        ranks=ranks,
        path=path,
        group=group_name,
    )


def heavy_error(
    layout: Layout,
    selection: Selection,
    total: float,
    weights: array[float] | None,
    ranks: Sequence[int],
    group_name: str,
) -> InvalidStats:
    """Every rank's weight is finite, and their sum is not: nothing can be divided by it."""
    path = None
    if math.isfinite(total) and weights is not None:
        position = next(position for position, weight in enumerate(weights) if not math.isfinite(weight))
        path = layout.names[selection.slots[position]]
    where = f" of {path!r}" if path is not None else ""
    return InvalidStats(
        f"the weights{where} add up to more than a float64 can hold, over the ranks of {group_name}.\n"
        "Divide them all by one number. Nothing was reduced; the reducer goes on working.",
        ranks=ranks,
        path=path,
        group=group_name,
    )


def nonfinite_error(
    layout: Layout, held: Iterable[tuple[Sequence[int], Sequence[int]]], group_name: str
) -> NonFiniteStat:
    """``held``: slots that are not finite, and on which ranks."""
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
