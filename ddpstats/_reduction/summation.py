"""The numbers of all ranks, added up here as on every other rank: what an exchange of everything leaves to do.

1. Each rank's leaves are placed in the layout that was just agreed on, and become lanes as in a reduction (`lanes_of`).
2. The lanes are added in the order of ranks, so that every rank has the same bits.
3. What the lanes cannot hold (a product with its own exponent, a sum that overflowed) is computed exactly (`exact`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from ddpstats._base import exact_sums
from ddpstats._ranks.lanes import PARTIAL, WEIGHT, Buffer
from ddpstats._ranks.vectors import add, is_finite, spread
from ddpstats._reduction import slots
from ddpstats._reduction.layout import NONFINITE, PRESENT, Layout, Placement
from ddpstats._reduction.wire import Numbers


def lanes_of(
    layout: Layout,
    placement: Placement,
    sums: array[float],
    weights: float | array[float],
    finite: bool,
    skip: bool,
    mixed: tuple[int, ...],
) -> tuple[array[float], array[float], array[float]]:
    """One rank's sums, weights and codes per slot: what is not finite is counted, or left out."""
    codes = placement.codes
    weights = array("d", (weights,)) * len(sums) if isinstance(weights, float) else weights
    if mixed:
        codes = array("d", codes)
        for i in mixed:
            codes[placement.slots[i]] += NONFINITE
    if not finite:
        sums, weights, codes = array("d", sums), array("d", weights), array("d", codes)
        for i, slot in enumerate(placement.slots):
            if not math.isfinite(sums[i]):
                codes[slot] += NONFINITE - (PRESENT if skip else 0)
                if skip:
                    sums[i] = weights[i] = 0.0
    if layout.extremes:
        sums = array("d", sums)
        for i, slot in enumerate(placement.slots):
            if slot in layout.extremes and not math.isnan(sums[i]):
                sums[i] = 0.0
    return spread(layout.size, placement.slots, sums), spread(layout.size, placement.slots, weights), codes


def extremes_of(layout: Layout, placement: Placement, sums: Sequence[float], skip: bool) -> Iterator[tuple[int, float]]:
    """(slot, value) of one rank's minima and maxima, minima negated: so that the largest of all ranks counts."""
    for slot, value in zip(placement.slots, sums, strict=True):
        op = layout.extremes.get(slot)
        if op is not None and placement.codes[slot] == PRESENT and (math.isfinite(value) if skip else value == value):
            yield slot, -value if op == "min" else value


def nonfinite_slots(placement: Placement, sums: Sequence[float], mixed: Sequence[int]) -> list[int]:
    """Where one rank has a NaN or an infinity."""
    found = [slot for slot, value in zip(placement.slots, sums, strict=True) if not math.isfinite(value)]
    return found + [placement.slots[i] for i in mixed]


def extremes_from(layout: Layout, largest: Iterable[float]) -> dict[int, float]:
    """Slot -> minimum or maximum, from the largest of what all ranks' `extremes_of` gave."""
    ops = layout.extremes.items()
    return {slot: -value if op == "min" else value for (slot, op), value in zip(ops, largest, strict=True)}


@dataclass(frozen=True)
class Share:
    """One rank's numbers, and where they go."""

    placement: Placement
    numbers: Numbers

    @cached_property
    def sums(self) -> array[float]:
        """With zeros for what has an exponent of its own, and is added in the end."""
        if not self.numbers.scaled:
            return self.numbers.sums
        sums = array("d", self.numbers.sums)
        for position in self.numbers.scaled:
            sums[position] = 0.0
        return sums

    @cached_property
    def finite(self) -> bool:
        return is_finite(self.sums)

    @cached_property
    def is_whole(self) -> bool:
        """A plain, finite value of the call's weight for every slot."""
        numbers = self.numbers
        return self.placement.whole and self.finite and isinstance(numbers.weights, float) and not numbers.mixed

    @cached_property
    def position_of(self) -> dict[int, int]:
        """Slot -> leaf."""
        return {slot: position for position, slot in enumerate(self.placement.slots)}

    def term(self, slot: int, skip: bool) -> tuple[Fraction, float] | None:
        """This rank's exact sum and weight at ``slot``; None where it has none."""
        position = self.position_of.get(slot)
        if position is None or self.placement.codes[slot] != PRESENT:
            return None
        weights, scaled = self.numbers.weights, self.numbers.scaled.get(position)
        weight = weights if isinstance(weights, float) else weights[position]
        if scaled is not None:
            return exact_sums.as_fraction(scaled), weight
        value = self.numbers.sums[position]
        if not math.isfinite(value):
            assert skip, "a leaf that is not finite has no exact mean"
            return None
        return Fraction(value), weight


class Summation:
    """The sum over all ranks; ``shares`` in the order of ranks."""

    def __init__(self, layout: Layout, shares: Sequence[Share], skip: bool) -> None:
        self._layout, self._shares, self._skip = layout, shares, skip

    def write_to(self, buffer: Buffer) -> None:
        """Leave what one all_reduce would have left."""
        layout, weight = self._layout, 0.0
        sums, weights, codes = (array("d", bytes(8 * layout.size)) for _ in range(3))
        for share in self._shares:
            numbers = share.numbers
            lanes = lanes_of(
                layout, share.placement, share.sums, numbers.weights, share.finite, self._skip, numbers.mixed
            )
            for total, lane in zip((sums, weights, codes), lanes, strict=True):
                add(total, lane)
            weight += numbers.weight
        buffer.lanes[PARTIAL] = not all(share.is_whole for share in self._shares)
        buffer.lanes[WEIGHT] = weight
        slots.write(buffer, layout, sums, weights, codes)

    def extremes(self) -> dict[int, float]:
        """Slot -> minimum or maximum."""
        largest = dict.fromkeys(self._layout.extremes, -math.inf)
        for share in self._shares:
            for slot, value in extremes_of(self._layout, share.placement, share.sums, self._skip):
                largest[slot] = max(largest[slot], value)
        return extremes_from(self._layout, largest.values())

    def nonfinite(self) -> Iterator[tuple[int, list[int]]]:
        """(position of the rank, slots where it is not finite)."""
        for position, share in enumerate(self._shares):
            yield position, nonfinite_slots(share.placement, share.sums, share.numbers.mixed)

    def scaled_slots(self) -> set[int]:
        """Where some rank's product has an exponent of its own, and no value is NaN or infinite."""
        scaled = {share.placement.slots[position] for share in self._shares for position in share.numbers.scaled}
        if scaled and not self._skip:
            scaled.difference_update(*(found for _, found in self.nonfinite()))
        return scaled

    def exact(self, slot: int) -> float:
        """The mean or sum at ``slot``, rounded once. No value there is NaN or infinite, or it is left out."""
        terms = [term for share in self._shares if (term := share.term(slot, self._skip)) is not None]
        sums = [value for value, _ in terms]
        if dict(self._layout.specials).get(slot) == "sum":
            return exact_sums.total(sums)
        return exact_sums.mean(sums, [weight for _, weight in terms])
