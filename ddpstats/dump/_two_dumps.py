"""Two ranks' dumps compared, in one pass, keeping no more than the rows that differ, and of these the first ones.

1. Take both dumps' entries by NAME (`_pair`).
2. Where both are the same text, apart from where in memory the tensors lay, all their statistics are equal: count
   them, and go on. That is most entries of most comparisons, and nothing of them is parsed.
3. Else compare them leaf by leaf (`_rows`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Literal

from ddpstats.dump._entries import Entry
from ddpstats.dump._files import RankDump
from ddpstats.dump._pair import Pair, pairs
from ddpstats.dump._rows import EntryComparer, Row
from ddpstats.dump._scan import Member

KEPT_ROWS = 3000

_MEMORY_FIELDS = re.compile(r',\s*"device":\s*"[^}]*\}')  # our leaves' last fields; nothing in them is compared
_NOT_FINITE = ("NaN", "Infinity", '"nan"', 'inf"')

Sink = Callable[[list[Row]], None]
Progress = Callable[[int], None]


@dataclass
class Found:
    """What the comparison of two dumps gave.

    Attributes:
        paired: entries that both have.
        only_a: entries that A has, `only_b` that B has.
        tensors: tensors and plain values that were compared.
        unequal: rows in which anything differs, entries that one side lacks included.
        failed: rows over the tolerance, or not comparable.
        highlighted: rows that differ, fail or stand out in another way.
        first_unequal: the first of them in execution order.
        first_failed: likewise.
    """

    paired: int = 0
    only_a: int = 0
    only_b: int = 0
    tensors: int = 0
    unequal: int = 0
    failed: int = 0
    highlighted: int = 0
    first_unequal: Row | None = None
    first_failed: Row | None = None
    _kept: list[tuple[tuple[int, int, int], Row]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The first rows that differ or are highlighted, in execution order; at most `KEPT_ROWS`."""
        return [row for _, row in sorted(self._kept, key=lambda kept: kept[0], reverse=True)]

    def count(self, rows: list[Row]) -> None:
        for row in rows:
            self.unequal += row.unequal
            self.failed += row.failed
            if row.unequal:
                self.first_unequal = _first(self.first_unequal, row)
            if row.failed:
                self.first_failed = _first(self.first_failed, row)
            if row.unequal or row.failed or row.color is not None:
                self._keep(row)

    def _keep(self, row: Row) -> None:
        """The heap's root is the last in execution order, and goes first."""
        order = (-row.index, -row.order[1], -self.highlighted)
        self.highlighted += 1
        if len(self._kept) < KEPT_ROWS:
            heappush(self._kept, (order, row))
        elif order > self._kept[0][0]:
            heappushpop(self._kept, (order, row))


def _first(one: Row | None, other: Row) -> Row:
    return one if one is not None and one.order <= other.order else other


def compare_dumps(
    a: RankDump, b: RankDump, comparer: EntryComparer, *, sink: Sink | None = None, progress: Progress | None = None
) -> Found:
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
    found = Found()
    short = sink is None and comparer.mode != "tensor"
    for pair in pairs(_Tracked(a, progress), _Tracked(b, progress)):
        if short and pair.a is not None and pair.b is not None and _same(pair.a.text, pair.b.text):
            found.paired += 1
            found.tensors += pair.a.text.count('"Max"')
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


def _rows(pair: Pair, a: RankDump, b: RankDump, comparer: EntryComparer, found: Found) -> list[Row]:
    entry_a, entry_b = _entry(a, pair.a), _entry(b, pair.b)
    if entry_a is not None and entry_b is not None:
        found.paired += 1
        rows = comparer.rows(pair.index, entry_a, entry_b)
        found.tensors += len(rows)
        return rows
    side: Literal["A", "B"] = "A" if entry_a is not None else "B"
    entry = entry_a or entry_b
    assert entry is not None
    found.only_a += side == "A"
    found.only_b += side == "B"
    return comparer.alone(pair.index, entry, side)


def _entry(dump: RankDump, member: Member | None) -> Entry | None:
    return None if member is None else dump.entry(member)


def _same(a: str, b: str) -> bool:
    """Whether two entries are equal in all that is compared, as far as their text tells; nothing in them is NaN."""
    if a != b and _MEMORY_FIELDS.sub("}", a) != _MEMORY_FIELDS.sub("}", b):
        return False
    return not any(word in a for word in _NOT_FINITE)
