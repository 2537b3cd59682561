"""Two ranks' dumps compared, in one pass, keeping no more than the rows that differ, and of these the first ones.

1. Take both dumps' entries by NAME (`_pair`).
2. Where both are the same text, apart from where in memory the tensors lay, all their statistics are equal: count
   them, and go on. Nothing of them is parsed.
3. Where they differ in nothing but finite statistics, and enough rows are kept already, compare these numbers alone.
4. Else parse them, and compare them leaf by leaf (`_rows`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Literal

from ddpstats.dump.compare._comparer import EntryComparer
from ddpstats.dump.compare._pair import Pair, pairs
from ddpstats.dump.compare._rows import Row
from ddpstats.dump.compare._rules import difference, is_over
from ddpstats.dump.format._entries import STATISTICS, DumpEntry
from ddpstats.dump.format._files import RankDump
from ddpstats.dump.format._scan import Member, Progress

KEPT_ROWS = 3000

_MEMORY_FIELDS = re.compile(  # our leaves' last fields, as we write them; nothing in them is compared
    r'"device":\s*"[^"]*",\s*"stride":[^"]*"data_ptr":[^"]*"storage_offset":[^"]*"storage_ptr":[^"]*'
    r'"storage_bytes":[^"]*"storage_id":[^"]*"stream":[^,}]*'
)
_CHECKSUM = re.compile(r'"md5":\s*"')
_STATISTICS = re.compile(r'"Max":\s*([^,]+),\s*"Min":\s*([^,]+),\s*"Mean":\s*([^,]+),\s*"Norm":\s*([^,]+)')
_GROUPS = 1 + len(STATISTICS)  # what `_STATISTICS.split` gives per leaf: the text before it, and its groups
_NOT_FINITE = ("NaN", "Infinity", '"nan"', 'inf"')

Sink = Callable[[list[Row]], None]


@dataclass
class PairedDumps:
    """What the comparison of two dumps gave.

    Attributes:
        paired: entries that both have.
        only_a: entries that A has, `only_b` that B has.
        tensors: those of entries that both have.
        by_statistics: of these, in tensor mode, those that neither side saved.
        unequal: rows in which anything differs, entries that one side lacks included.
        failed: rows over the tolerance, or not comparable.
        unequal_tensors, failed_tensors: those of them that are about one of ``tensors``: the others are about values
            that are no tensors, and about entries that one side lacks.
        highlighted: rows that differ, fail or stand out in another way.
        first_unequal: the first of them in execution order.
        first_failed: likewise.
    """

    paired: int = 0
    only_a: int = 0
    only_b: int = 0
    tensors: int = 0
    by_statistics: int = 0
    unequal: int = 0
    failed: int = 0
    unequal_tensors: int = 0
    failed_tensors: int = 0
    highlighted: int = 0
    first_unequal: Row | None = None
    first_failed: Row | None = None
    _failed: _Earliest = field(default_factory=lambda: _Earliest())
    _others: _Earliest = field(default_factory=lambda: _Earliest())

    @property
    def rows(self) -> list[Row]:
        """The first rows that fail, and the first others that differ or stand out, in execution order."""
        return sorted([*self._failed.rows, *self._others.rows], key=lambda row: row.order)

    def count(self, rows: list[Row]) -> None:
        for row in rows:
            self.by_statistics += row.by_statistics
            self.unequal += row.unequal
            self.failed += row.failed
            if is_of_a_tensor(row):
                self.unequal_tensors += row.unequal
                self.failed_tensors += row.failed
            if row.unequal:
                self.first_unequal = _first(self.first_unequal, row)
            if row.failed:
                self.first_failed = _first(self.first_failed, row)
            if row.unequal or row.failed or row.color is not None:
                self.highlighted += 1
                (self._failed if row.failed else self._others).add(row)

    def count_only(self, index: int, tensors: int, unequal: int, failed: int) -> bool:
        """Count rows that are not there, if none of them would be kept; returns whether it did."""
        if (unequal and self._others.would_keep(index)) or (failed and self._failed.would_keep(index)):
            return False
        self.paired += 1
        self.tensors += tensors
        self.unequal += unequal
        self.highlighted += unequal
        self.failed += failed
        self.unequal_tensors += unequal
        self.failed_tensors += failed
        return True


def is_of_a_tensor(row: Row) -> bool:
    """Of an entry that both sides have."""
    return not row.only and row.a is not None and row.a.is_tensor


class _Earliest:
    """The rows that come first in execution order, at most `KEPT_ROWS`, whatever the order in which they are added."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int, int], Row]] = []  # its root is the last row, and goes first
        self._added = 0

    @property
    def rows(self) -> list[Row]:
        return [row for _, row in sorted(self._heap, key=lambda kept: kept[0], reverse=True)]

    def would_keep(self, index: int) -> bool:
        return len(self._heap) < KEPT_ROWS or -index >= self._heap[0][0][0]

    def add(self, row: Row) -> None:
        self._added += 1
        index, only_b, place = row.order
        order = (-index, -only_b, -place, -self._added)
        if len(self._heap) < KEPT_ROWS:
            heappush(self._heap, (order, row))
        elif order > self._heap[0][0]:
            heappushpop(self._heap, (order, row))


def _first(one: Row | None, other: Row) -> Row:
    return one if one is not None and one.order <= other.order else other


def compare_dumps(
    a: RankDump, b: RankDump, comparer: EntryComparer, *, sink: Sink | None = None, progress: Progress | None = None
) -> PairedDumps:
    """Compare two dumps.

    Args:
        a: the one in question.
        b: the reference.
        comparer: makes the rows.
        sink: gets all rows, equal ones too, nearly in A's order; without it equal entries are only counted.
        progress: called with the number of bytes after each read of either file.

    Raises:
        DumpError: for a damaged dump, when its damage is reached.
    """
    found = PairedDumps()
    short = sink is None and comparer.mode != "tensor"
    for pair in pairs(_Tracked(a, progress), _Tracked(b, progress)):
        if short and pair.a is not None and pair.b is not None:
            counts = _counts(pair.a.text, pair.b.text, comparer)
            if counts is not None and found.count_only(pair.index, *counts):
                continue
        rows = _rows(pair, a, b, comparer, found)
        found.count(rows)
        if sink is not None:
            sink(rows)
    return found


class _Tracked:
    """A dump whose reading is reported."""

    def __init__(self, dump: RankDump, progress: Progress | None) -> None:
        self.members = lambda: dump.members(progress)
        self.reread = dump.reread


def _rows(pair: Pair, a: RankDump, b: RankDump, comparer: EntryComparer, found: PairedDumps) -> list[Row]:
    entry_a, entry_b = _entry(a, pair.a), _entry(b, pair.b)
    if entry_a is not None and entry_b is not None:
        found.paired += 1
        rows = comparer.rows(pair.index, entry_a, entry_b)
        found.tensors += sum(map(is_of_a_tensor, rows))
        return rows
    side: Literal["A", "B"] = "A" if entry_a is not None else "B"
    entry = entry_a or entry_b
    assert entry is not None
    found.only_a += side == "A"
    found.only_b += side == "B"
    return comparer.alone(pair.index, entry, side)


def _entry(dump: RankDump, member: Member | None) -> DumpEntry | None:
    return None if member is None else dump.entry(member)


def _counts(a: str, b: str, comparer: EntryComparer) -> tuple[int, int, int] | None:
    """Tensors, unequal and failed ones of two entries, by their text alone; None where that cannot tell."""
    if any(word in a for word in _NOT_FINITE):
        return None  # such rows stand out, even if they are equal
    if comparer.mode == "md5" and len(_CHECKSUM.findall(a)) != a.count('"Max"'):
        return None  # a tensor without a checksum is not compared, even if all else is equal
    if a == b:
        return a.count('"Max"'), 0, 0
    a, b = _MEMORY_FIELDS.sub("", a), _MEMORY_FIELDS.sub("", b)
    if a == b:
        return a.count('"Max"'), 0, 0
    if comparer.mode != "statistics" or any(word in b for word in _NOT_FINITE):
        return None
    return _statistics_counts(_STATISTICS.split(a), _STATISTICS.split(b), comparer.tolerance)


def _statistics_counts(a: list[str], b: list[str], tolerance: float) -> tuple[int, int, int] | None:
    if a[::_GROUPS] != b[::_GROUPS]:
        return None  # something else than statistics differs
    unequal = failed = 0
    for start in range(1, len(a), _GROUPS):
        mine, theirs = a[start : start + _GROUPS - 1], b[start : start + _GROUPS - 1]
        if mine == theirs:
            continue
        try:
            pairs_of = [difference(float(x), float(y)) for x, y in zip(mine, theirs, strict=True) if x != y]
        except ValueError:  # null, true
            return None
        unequal += any(pair[0] for pair in pairs_of)
        failed += is_over((pair[1] for pair in pairs_of), tolerance)
    return len(a) // _GROUPS, unequal, failed
