"""The timeline holds all that the report shows. Pure: the same records give the same timeline.

1. `Timeline.groups`: who belongs together, and the number from which on a group's ranks did different things: numbers
   pair what ranks did until there, and nothing is known to belong together afterwards.
2. `Timeline.messages`: which send went to which receive.
3. `Timeline.keys`: which path each rank has, how often and since when: by the labels of its collectives, and by what it
   put into reductions of ddpstats.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from operator import attrgetter
from typing import NamedTuple

from ddpstats._base.marks import VALUES, Mark
from ddpstats.guard.diagnosis import DOUBT, GuardFinding, Pair
from ddpstats.guard.event import BY_TORCH
from ddpstats.guard.record import RankRecord, assumed, diagnose, groups_of, message_pairs, not_compared
from ddpstats.report.flight_recorder import Span


class Group(NamedTuple):
    """``cut``: the first number at which its ranks are known to differ, or a rank is missing; None where they agree."""

    words: str
    ranks: tuple[int, ...]
    cut: int | None


@dataclass
class Cell:
    """One rank's uses of a key: their number, the first and the last. ``series``: (time, value), as far as known."""

    count: int = 0
    first_time: float = math.inf
    last_time: float = 0.0
    series: list[tuple[float, float]] = field(default_factory=list)

    def add(self, time: float, value: float | None) -> None:
        self.count += 1
        self.first_time, self.last_time = min(self.first_time, time), max(self.last_time, time)
        if value is not None:
            self.series.append((time, value))

    @property
    def not_finite(self) -> int:
        """The number of values that are NaN or infinite."""
        return sum(not math.isfinite(value) for _, value in self.series)


class Key(NamedTuple):
    """A path, and the ranks that have it.

    ``source``: its group of collectives, or the name of its reduction. ``ranks``: those that take part there, as far as
    their records still show. ``fewer``: those that had it less often than others.
    """

    name: str
    source: str
    ranks: tuple[int, ...]
    cells: Mapping[int, Cell]
    fewer: tuple[int, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that never had it."""
        return tuple(rank for rank in self.ranks if rank not in self.cells)

    @property
    def differs(self) -> bool:
        return bool(self.missing or self.fewer)


@dataclass(frozen=True)
class Timeline:
    """All that the report shows.

    ``began``, ``ended``: of all that has a time, seconds since 1970. ``indexes``: of each finding, rank -> which of its
    events the finding is about. ``spans``: rank -> index of an event -> what the Flight Recorder knows of it.
    ``not_compared``: what ranks may have done differently beside the findings. ``assumed``: which ranks were taken to
    belong together. ``notes``: what could not be used, and why.
    """

    records: Sequence[RankRecord]
    world_size: int
    groups: Mapping[str, Group]
    messages: Sequence[Pair]
    keys: Sequence[Key]
    marks: Sequence[Mark]
    findings: Sequence[GuardFinding]
    indexes: Sequence[Mapping[int, int]]
    spans: Mapping[int, Mapping[int, Span]]
    began: float
    ended: float
    not_compared: Sequence[str]
    assumed: Sequence[str]
    notes: Sequence[str]

    @property
    def has_findings(self) -> bool:
        """True if the exit status is 1. A doubt is no finding; that not all could be compared is one."""
        return bool(self.marks or self.not_compared) or any(finding.kind != DOUBT for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The sentence where no finding says more: all is well only where all was compared."""
        if self.findings:
            return ""
        if not any(record.events for record in self.records):
            return "No record of collectives."
        if self.not_compared:
            return "Nothing differs in what could be compared, which is not all."
        if self.assumed:
            return "All ranks that left a record issued the same collectives in the same order, as far as can be told."
        return "All ranks issued the same collectives in the same order."

    def spans_of(self, finding: int) -> dict[int, Span]:
        """Return what the Flight Recorder knows of each rank's event in that finding."""
        indexes = self.indexes[finding].items()
        return {rank: self.spans[rank][index] for rank, index in indexes if index in self.spans.get(rank, {})}


def timeline_of(
    records: Sequence[RankRecord], marks: Sequence[Mark], spans: Mapping[int, Mapping[int, Span]], notes: Sequence[str]
) -> Timeline:
    """Return the timeline of these records. ``marks``: of files beside them."""
    findings = diagnose(records)
    groups = _groups(records, findings)
    times = [event.started for record in records for event in record.events]
    times += [mark.time for mark in (*marks, *(mark for record in records for mark in record.marks))]
    return Timeline(
        records,
        max([record.world_size for record in records], default=0),
        groups,
        message_pairs(records),
        sorted(_keys(records, groups), key=lambda key: not key.differs),
        _distinct([mark for record in records for mark in record.marks if mark.kind != VALUES], marks),
        findings,
        _indexes(findings, records),
        spans,
        min(times, default=0.0),
        max(times, default=0.0),
        not_compared(records),
        assumed(records),
        notes,
    )


def _indexes(findings: Sequence[GuardFinding], records: Sequence[RankRecord]) -> list[dict[int, int]]:
    """Find each event of a finding by its time: numbers begin again with each guard of a program."""
    about = {(rank, event.group, event.started) for finding in findings for rank, event in finding.by_rank.items()}
    index_of = {
        at: index
        for record in (records if about else ())
        for index, event in enumerate(record.events)
        if (at := (record.rank, event.group, event.started)) in about
    }
    return [
        {rank: index_of[rank, event.group, event.started] for rank, event in finding.by_rank.items()}
        for finding in findings
    ]


def _groups(records: Sequence[RankRecord], findings: Sequence[GuardFinding]) -> dict[str, Group]:
    cuts: dict[str, int] = {}
    for finding in findings:
        if finding.kind != DOUBT:
            cuts[finding.group] = min(finding.seq, cuts.get(finding.group, finding.seq))
    of_messages = {name: {"words": f"group {name!r}", "ranks": ()} for r in records for name in r.events_by_group}
    return {
        name: Group(group["words"], tuple(group["ranks"]), cuts.get(name))
        for name, group in {**of_messages, **groups_of(records)}.items()
    }


def _distinct(recorded: Sequence[Mark], beside: Sequence[Mark]) -> list[Mark]:
    """Return the marks by time. Of what all ranks recorded together the first is kept.

    A record's own comes before that of a file ``beside``, whose time may be of another clock, and in whole seconds.
    """
    by_time, distinct = attrgetter("time"), dict[object, Mark]()
    for mark in (*sorted(recorded, key=by_time), *sorted(beside, key=by_time)):
        distinct.setdefault((mark.kind, mark.step, mark.ranks, mark.text if mark.step is None else ""), mark)
    return sorted(distinct.values(), key=by_time)


# -- keys -------------------------------------------------------------------------------------------------------------

Use = tuple[int, str, float, "float | None"]
"""A rank, the name of a key, when the rank had it, and its value if that is known."""


def _keys(records: Sequence[RankRecord], groups: Mapping[str, Group]) -> Iterator[Key]:
    killed = {record.rank for record in records if record.end is None}
    for name, group in groups.items():
        yield from _keys_of(group.words, killed, *_labels(name, group, records))
    for name in {mark.text: None for record in records for mark in record.marks if mark.kind == VALUES}:
        yield from _keys_of(f"reduction {name!r}", killed, *_values(name, records))


def _keys_of(source: str, killed: set[int], ranks: Iterable[int], uses: Iterator[Use]) -> Iterator[Key]:
    """Yield the keys of one source. A rank that was killed may lack the last round, and that alone is no difference."""
    cells: defaultdict[str, defaultdict[int, Cell]] = defaultdict(lambda: defaultdict(Cell))
    for rank, name, time, value in uses:
        cells[name][rank].add(time, value)
    for name, by_rank in cells.items():
        most = max(cell.count for cell in by_rank.values())
        fewer = tuple(rank for rank, cell in by_rank.items() if cell.count < most - (rank in killed))
        yield Key(name, source, tuple(ranks), by_rank, fewer)


def _labels(name: str, group: Group, records: Sequence[RankRecord]) -> tuple[Iterable[int], Iterator[Use]]:
    """Return what ranks called the tensors of their collectives there, from the first number that all still have."""
    known = [r for r in records if r.rank in group.ranks and (r.complete or name in r.events_by_group)]
    events_of = {record.rank: record.events_by_group.get(name, []) for record in known}
    first = max((events_of[record.rank][0].seq for record in known if not record.complete), default=0)
    return events_of, (
        (rank, str(event.label), event.started, None)
        for rank, events in events_of.items()
        for event in dropwhile(lambda event: event.seq < first, events)
        if event.label not in (None, BY_TORCH) and not event.is_message  # what torch issues has no name
    )


def _values(name: str, records: Sequence[RankRecord]) -> tuple[Iterable[int], Iterator[Use]]:
    """Return what ranks put into a reduction by that name; as many of the newest as all ranks still have."""
    of_all = {r.rank: [mark for mark in r.marks if (mark.kind, mark.text) == (VALUES, name)] for r in records}
    marks_of = {rank: marks for rank, marks in of_all.items() if marks}
    is_cut = any(not record.complete for record in records if record.rank in marks_of)
    common = min(map(len, marks_of.values())) if is_cut else 0  # 0: all of them
    uses = ((rank, mark, path) for rank, marks in marks_of.items() for mark in marks[-common:] for path in mark.values)
    return marks_of, (
        (rank, path, mark.time, value) for rank, mark, path in uses if (value := mark.values[path]) is not None
    )
