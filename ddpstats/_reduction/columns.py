"""Every rank's own value in every slot, on every rank: what ``per_rank=True`` adds to a reduction.

1. Each rank writes its column (`column`): a float64 for each slot of the layout that all ranks have agreed on.
2. One all_gather brings all columns to all ranks. Its size follows from the layout and the number of ranks alone, and
   it is not part of the group's buffer, so that calls which do not ask for it pay nothing.
3. `Columns` keeps them as they came; what ranks hold in one slot is read when somebody asks for it.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence

from ddpstats._reduction.layout import PRESENT, Layout, Placement
from ddpstats._reduction.values import Part
from ddpstats.errors import InvalidStats

MAX_GATHERED_BYTES = 1 << 28
"""Of all columns together: 4,096 ranks with 8,192 slots each."""

# In a column of float64 one NaN stands for "no value here"; a value that is NaN becomes another one.
_NO_VALUE = 0x7FF8_6E6F_6E65_0000
(_NAN,) = struct.unpack("=q", struct.pack("=d", math.nan))
_BYTES = 8


def too_large(layout: Layout, ranks: Sequence[int], name: str | None, group_name: str) -> InvalidStats | None:
    """The error, where all columns together are more than a rank should have: the same on every rank."""
    each = layout.size * _BYTES
    if each * len(ranks) <= MAX_GATHERED_BYTES:
        return None
    return InvalidStats(
        f"per_rank=True would bring {each * len(ranks):,} bytes to every rank of {group_name}: {each:,} of each rank, "
        f"for all paths of name={name!r}. The limit is {MAX_GATHERED_BYTES:,}.\n"
        "Give the paths that matter a name of their own. Nothing is returned; the reducer goes on working.",
        ranks=ranks,
        group=group_name,
    )


def column(layout: Layout, placement: Placement, part: Part, skip: bool) -> bytearray:
    """One rank's value in each slot; none where it contributes nothing to the slot's value."""
    assert part.values is not None, "prepared without per_rank"
    if placement.whole and part.finite and isinstance(part.weights, float) and part.weights > 0:
        return bytearray(part.values)
    cells = array("q", [_NO_VALUE]) * layout.size
    bits = memoryview(part.values).cast("B").cast("q")
    for leaf, slot in enumerate(placement.slots):
        weight = part.weights if isinstance(part.weights, float) else part.weights[leaf]
        if placement.codes[slot] == PRESENT and weight and not (skip and _is_left_out(part, leaf)):
            cells[slot] = _NAN if math.isnan(part.values[leaf]) else bits[leaf]
    return bytearray(cells)


def _is_left_out(part: Part, leaf: int) -> bool:
    """By ``nonfinite="skip"``. What has an exponent of its own is the sum of finite values."""
    return not math.isfinite(part.sums[leaf]) and leaf not in part.scaled


class Columns:
    """All ranks' columns; ``ranks`` are global ranks, in the order of the columns."""

    def __init__(self, ranks: Sequence[int], received: Iterable[bytes | bytearray]) -> None:
        self.ranks = tuple(map(int, ranks))
        self._columns = [array("d", values) for values in received]

    def row(self, slot: int) -> list[float | None]:
        """Every rank's value in one slot; None where it has none."""
        found: list[float | None] = [values[slot] for values in self._columns]
        for position, value in enumerate(found):
            if value != value and memoryview(self._columns[position]).cast("B").cast("q")[slot] == _NO_VALUE:
                found[position] = None
        return found

    def extremes(self, ops: Mapping[int, str]) -> dict[int, float]:
        """Slot -> minimum or maximum of the values that are no NaN; ``ops``: slot -> "min" or "max"."""
        found: dict[int, float] = {}
        for slot, op in ops.items():
            values = [value for value in self.row(slot) if value is not None and value == value]
            found[slot] = (min if op == "min" else max)(values, default=math.nan)
        return found
