"""Slots in the group's buffer, behind the control lanes: weighted sums | weights | codes, one lane per slot each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ddpstats._agreement.lanes import HEADER_LANES, PARTIAL, WEIGHT, Buffer
from ddpstats._agreement.vectors import spread
from ddpstats._reduction.layout import Layout

LANES_PER_SLOT = 3


def lanes_needed(slots: int) -> int:
    """How many float64 a layout of ``slots`` slots needs."""
    return HEADER_LANES + LANES_PER_SLOT * slots


def write_whole(buffer: Buffer, layout: Layout, sums: array[float], weight: float, codes: array[float]) -> None:
    """Every slot has a finite value of the call's weight."""
    size, lanes = layout.size, buffer.lanes
    lanes[PARTIAL] = 0.0
    start = HEADER_LANES
    lanes[start : start + size] = sums
    lanes[start + size : start + 2 * size] = array("d", (weight,)) * size
    lanes[start + 2 * size : start + 3 * size] = codes


def write_partial(
    buffer: Buffer,
    layout: Layout,
    slots: Sequence[int],
    sums: array[float],
    weights: float | array[float],
    codes: array[float],
) -> None:
    """Some slots only; the others add nothing."""
    size, lanes, start = layout.size, buffer.lanes, HEADER_LANES
    if isinstance(weights, float):
        weights = array("d", (weights,)) * len(slots)
    lanes[start : start + size] = spread(size, slots, sums)
    lanes[start + size : start + 2 * size] = spread(size, slots, weights)
    lanes[start + 2 * size : start + 3 * size] = codes


def write_totals(
    buffer: Buffer,
    layout: Layout,
    weight: float,
    is_whole: bool,
    sums: array[float],
    weights: array[float],
    codes: array[float],
) -> None:
    """What a sum over ranks would have left here."""
    size, lanes, start = layout.size, buffer.lanes, HEADER_LANES
    lanes[PARTIAL], lanes[WEIGHT] = not is_whole, weight
    lanes[start : start + size] = sums
    lanes[start + size : start + 2 * size] = weights
    lanes[start + 2 * size : start + 3 * size] = codes


def sums_of(buffer: Buffer, layout: Layout) -> memoryview[float]:
    return buffer.lanes[HEADER_LANES : HEADER_LANES + layout.size]


def weights_of(buffer: Buffer, layout: Layout) -> memoryview[float]:
    return buffer.lanes[HEADER_LANES + layout.size : HEADER_LANES + 2 * layout.size]


def codes_of(buffer: Buffer, layout: Layout) -> memoryview[float]:
    return buffer.lanes[HEADER_LANES + 2 * layout.size : HEADER_LANES + 3 * layout.size]
