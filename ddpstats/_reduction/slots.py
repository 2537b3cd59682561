"""Slots in the group's buffer, behind the control lanes: weighted sums | weights | codes, one lane per slot each."""

from __future__ import annotations

from array import array

from ddpstats._ranks.lanes import HEADER_LANES, Buffer
from ddpstats._reduction.layout import Layout

LANES_PER_SLOT = 3


def lanes_needed(slots: int) -> int:
    """How many float64 a layout of ``slots`` slots needs."""
    return HEADER_LANES + LANES_PER_SLOT * slots


def write(buffer: Buffer, layout: Layout, sums: array[float], weights: array[float], codes: array[float]) -> None:
    """One entry per slot of each."""
    size, lanes, start = layout.size, buffer.lanes, HEADER_LANES
    lanes[start : start + size] = sums
    lanes[start + size : start + 2 * size] = weights
    lanes[start + 2 * size : start + 3 * size] = codes


def sums_of(buffer: Buffer, layout: Layout) -> memoryview[float]:
    return buffer.lanes[HEADER_LANES : HEADER_LANES + layout.size]


def weights_of(buffer: Buffer, layout: Layout) -> memoryview[float]:
    return buffer.lanes[HEADER_LANES + layout.size : HEADER_LANES + 2 * layout.size]


def codes_of(buffer: Buffer, layout: Layout) -> memoryview[float]:
    return buffer.lanes[HEADER_LANES + 2 * layout.size : HEADER_LANES + 3 * layout.size]
