"""Two ranks' dumps compared, in one pass, keeping no more than the rows that differ, and of these the first ones.

1. Take both dumps' entries by NAME, in one pass through both files (`pairs`).
2. Where both are the same text, apart from where in memory the tensors lay, all their statistics are equal: count
   them, and go on. Nothing of them is parsed.
3. Where they differ in nothing but finite statistics, and enough rows are kept already, compare these numbers alone.
4. Else parse them, and compare them leaf by leaf (`_rows`).

How entries of one NAME come together:

1. Take the next entry of A. If B's entry of that NAME was met before, read it again at its place.
2. Else go on in B until it comes, at most `_WINDOW` entries further. What B has in between is remembered by NAME and
   place in the file, not by content.
3. What has not come by then waits in the same way for B to reach it; its pair is given later than its turn.
4. At the end of both, what still waits is on one side only.

So memory is what the two orders differ by, not the size of the dumps. Where one dump has a NAME twice, the first goes
with the other's first, the second with the second.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Literal

from ddpstats.dump.compare._comparer import EntryComparer
from ddpstats.dump.compare._rows import Row
from ddpstats.dump.compare._rules import difference, is_over
from ddpstats.dump.reader import STATISTICS, DumpEntry, EntryText, RankDump

KEPT_ROWS = 3000

_MEMORY_FIELDS = re.compile(  # our leaves' last fields, as we write them; nothing in them is compared
    r'"device":\s*"[^"]*",\s*"stride":[^"]*"data_ptr":[^"]*"storage_offset":[^"]*"storage_ptr":[^"]*'
    r'"storage_bytes":[^"]*"storage_id":[^"]*"stream":[^,}]*'
)
_CHECKSUM = re.compile(r'"md5":\s*"')
_STATISTICS = re.compile(r'"Max":\s*([^,]+),\s*"Min":\s*([^,]+),\s*"Mean":\s*([^,]+),\s*"Norm":\s*([^,]+)')
_GROUPS = 1 + len(STATISTICS)  # what `_STATISTICS.split` gives per leaf: the text before it, and its groups
_NOT_FINITE = ("NaN", "Infinity", '"nan"', 'inf"')


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
        first_unequal: the first of them in execution order; `first_failed` likewise.
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
    _failed: _Earliest = field(default_factory=lambda: _Earliest())
    _others: _Earliest = field(default_factory=lambda: _Earliest())

    @property
    def rows(self) -> list[Row]:
        """The first rows that fail, and the first others that differ or stand out, in execution order."""
        return sorted([*self._failed.rows, *self._others.rows], key=lambda row: row.order)

    @property
    def first_failed(self) -> Row | None:
        return next(iter(self._failed.rows), None)

    def count(self, rows: list[Row]) -> None:
        for row in rows:
            self.by_statistics += row.by_statistics
            self.unequal += row.unequal
            self.failed += row.failed
            if is_of_a_tensor(row):
                self.unequal_tensors += row.unequal
                self.failed_tensors += row.failed
            if row.unequal and (self.first_unequal is None or row.order < self.first_unequal.order):
                self.first_unequal = row
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
        self.rows: list[Row] = []

    def would_keep(self, index: int) -> bool:
        return len(self.rows) < KEPT_ROWS or index <= self.rows[-1].index

    def add(self, row: Row) -> None:
        if self.would_keep(row.index):
            insort(self.rows, row, key=attrgetter("order"))
            del self.rows[KEPT_ROWS:]


def compare_dumps(
    a: RankDump,
    b: RankDump,
    comparer: EntryComparer,
    found: PairedDumps,
    *,
    is_short: bool = False,
) -> Iterator[Row]:
    """Compare two dumps, while the rows are taken.

    Args:
        a: the one in question.
        b: the reference.
        comparer: makes the rows.
        found: gets what the comparison gives.
        is_short: not all rows are wanted: entries whose text tells that they are equal are only counted.

    Yields:
        All rows, equal ones too, nearly in A's order; fewer with ``is_short``.

    Raises:
        DumpError: for a damaged dump, when its damage is reached.
    """
    is_short = is_short and comparer.mode != "tensor"
    for pair in pairs(a, b):
        if is_short and pair.a is not None and pair.b is not None:
            counts = _counts(pair.a.text, pair.b.text, comparer)
            if counts is not None and found.count_only(pair.index, *counts):
                continue
        rows = _rows(pair, a, b, comparer, found)
        found.count(rows)
        yield from rows


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


def _entry(dump: RankDump, member: EntryText | None) -> DumpEntry | None:
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


# -- entries of one NAME -----------------------------------------------------------------------------------------------

_WINDOW = 4096  # entries that one dump may have more than the other in one place, before pairs come late


@dataclass(frozen=True, slots=True)
class Pair:
    """What two dumps have under one NAME; None for the one that lacks it.

    Attributes:
        index: the entry's place in A, in B where A has none; from 0.
    """

    index: int
    a: EntryText | None
    b: EntryText | None


class _Waiting:
    """Members of one dump whose partner has not come: NAME -> places."""

    def __init__(self, dump: RankDump) -> None:
        self._dump = dump
        self._places: dict[str, deque[tuple[int, int, int]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def keep(self, index: int, member: EntryText) -> None:
        self._places.setdefault(member.key, deque()).append((index, member.offset, member.size))

    def take(self, key: str) -> tuple[int, EntryText] | None:
        places = self._places.get(key)
        if places is None:
            return None
        index, offset, size = places.popleft()
        if not places:
            del self._places[key]
        return index, self._dump.reread(key, offset, size)

    def all(self) -> Iterator[tuple[int, EntryText]]:
        order = sorted((place[0], key) for key, places in self._places.items() for place in places)
        for _, key in order:
            taken = self.take(key)
            assert taken is not None
            yield taken


def pairs(a: RankDump, b: RankDump) -> Iterator[Pair]:
    """All entries of both, by NAME; nearly in the order of A. Raises what reading raises."""
    of_a, of_b = _Waiting(a), _Waiting(b)
    theirs = enumerate(b.members())
    for index, mine in enumerate(a.members()):
        before = of_b.take(mine.key)
        found = before[1] if before is not None else None
        if found is None:
            for place, other in islice(theirs, max(1, _WINDOW - len(of_b))):
                if other.key == mine.key and mine.key not in of_a:
                    found = other
                    break
                yield from _late(place, other, of_a, of_b)
        if found is None:
            of_a.keep(index, mine)
        else:
            yield Pair(index, mine, found)
    for place, other in theirs:
        yield from _late(place, other, of_a, of_b)
    yield from (Pair(index, mine, None) for index, mine in of_a.all())
    yield from (Pair(place, None, other) for place, other in of_b.all())


def _late(place: int, other: EntryText, of_a: _Waiting, of_b: _Waiting) -> Iterator[Pair]:
    """An entry of B that nobody asks for now: its partner waits already, or it waits for it."""
    waited = of_a.take(other.key)
    if waited is None:
        of_b.keep(place, other)
    else:
        yield Pair(waited[0], waited[1], other)
