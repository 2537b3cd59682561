"""What all ranks did, as one thing to print, draw and hand on. Pure: the same records give the same timeline.

1. `Lane`: one rank's events as columns (time, which call, number in its group). There are many events and few calls.
2. `Timeline.groups`: who belongs together, and the number from which on a group's ranks did different things: numbers
   pair what ranks did until there, and nothing is known to belong together afterwards.
3. `Timeline.messages`: which send went to which receive.
4. `Timeline.keys`: which path each rank has, how often and since when: by the labels of its collectives, and by what it
   put into reductions of ours.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ddpstats._base.marks import VALUES, Mark
from ddpstats.guard.diagnosis import DOUBT, GuardFinding
from ddpstats.guard.event import BY_TORCH, Event
from ddpstats.guard.record import RankRecord, assumed, message_pairs, not_compared

_time_of = attrgetter("time")


@dataclass(frozen=True)
class CallSite:
    """All collectives of all ranks that differ in nothing but their number and their time."""

    group: str
    what: str
    op: str
    label: str | None
    site: str
    source: str
    is_message: bool


@dataclass(frozen=True)
class Span:
    """What the Flight Recorder knows of an event: torch's word for its state, and how long it took if it has ended."""

    state: str
    seconds: float | None


@dataclass(frozen=True)
class Lane:
    """One rank's events in the order in which it issued them. ``times``: seconds since 1970, never going back."""

    rank: int
    times: array[float]
    calls: array[int]
    seqs: array[int]
    complete: bool
    end: str
    spans: Mapping[int, Span] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, int]:
        """How many of its events the Flight Recorder saw in each state."""
        return dict(Counter(span.state for span in self.spans.values()))


@dataclass(frozen=True)
class Group:
    """``cut``: the first number at which its ranks are known to differ, or a rank is missing; None where they agree."""

    name: str
    words: str
    ranks: tuple[int, ...]
    cut: int | None = None


@dataclass
class Cell:
    """How often a rank has a key, and when first and last, since all ranks' records go back so far.

    ``series``: (time, value), where values are known.
    """

    count: int
    first_time: float
    last_time: float
    series: list[tuple[float, float]] = field(default_factory=list)

    @property
    def not_finite(self) -> int:
        """How many of the values are NaN or infinite."""
        return sum(not math.isfinite(value) for _, value in self.series)


@dataclass(frozen=True)
class Key:
    """A path, and the ranks that have it. ``place``: the group of collectives, or the name of a reduction, it is of.

    ``ranks``: those that take part there, as far as it is still known what they did. ``fewer``: those that had it less
    often than others.
    """

    name: str
    place: str
    ranks: tuple[int, ...]
    cells: Mapping[int, Cell]
    fewer: tuple[int, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Those that never had it."""
        return tuple(rank for rank in self.ranks if rank not in self.cells)

    @property
    def differs(self) -> bool:
        return bool(self.missing or self.fewer)


@dataclass(frozen=True)
class Timeline:
    """``began``, ``ended``: of all that has a time, seconds since 1970. ``notes``: what could not be used, and why.

    ``not_compared``: what else ranks may have done differently. ``assumed``: which ranks were taken to belong together.
    ``places``: of each finding, rank -> which of its lane's events the finding is about.
    """

    world_size: int
    lanes: Sequence[Lane]
    calls: Sequence[CallSite]
    groups: Mapping[str, Group]
    messages: Sequence[tuple[int, int, int, int]]
    keys: Sequence[Key]
    marks: Sequence[Mark]
    findings: Sequence[GuardFinding]
    began: float
    ended: float
    notes: Sequence[str] = ()
    not_compared: Sequence[str] = ()
    assumed: Sequence[str] = ()
    places: Sequence[Mapping[int, int]] = ()

    @property
    def has_findings(self) -> bool:
        """A doubt is told, and is none. That not all could be compared is one: something may differ there."""
        return bool(self.marks or self.not_compared) or any(finding.kind != DOUBT for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The sentence where no finding says more: all is well only where all was compared."""
        if not self.lanes:
            return "No record of collectives."
        if self.findings:
            return ""
        if self.not_compared:
            return "Nothing differs in what could be compared, which is not all."
        if self.assumed:
            return "All ranks that left a record issued the same collectives in the same order, as far as can be told."
        if not any(lane.calls for lane in self.lanes):
            return "No rank recorded a collective."
        return "All ranks issued the same collectives in the same order."

    def spans_of(self, number: int) -> dict[int, Span]:
        """Rank -> what the Flight Recorder knows of its event in that finding."""
        spans = {lane.rank: lane.spans for lane in self.lanes}
        return {rank: spans[rank][place] for rank, place in self.places[number].items() if place in spans[rank]}

    def meetings(self) -> Iterator[tuple[Group, int, list[tuple[float, int, int]]]]:
        """(group, number, its events as (time, rank, place) by time) of what several ranks did, as is known, alike."""
        met: dict[str, dict[int, list[tuple[float, int, int]]]] = {name: {} for name in self.groups}
        for lane in self.lanes:
            for place, number in enumerate(lane.calls):
                call, seq = self.calls[number], lane.seqs[place]
                if not call.is_message:
                    met[call.group].setdefault(seq, []).append((lane.times[place], lane.rank, place))
        for name, by_number in met.items():
            group = self.groups[name]
            for seq, events in sorted(by_number.items()):
                if len(events) > 1 and (group.cut is None or seq < group.cut):
                    yield group, seq, sorted(events)


def timeline_of(
    records: Sequence[RankRecord],
    findings: Sequence[GuardFinding],
    marks: Sequence[Mark] = (),
    spans: Mapping[int, Mapping[int, Span]] | None = None,
    notes: Sequence[str] = (),
) -> Timeline:
    """``marks``: of files beside the records. ``spans``: rank -> place among its events -> what is known besides."""
    table: dict[CallSite, int] = {}
    lanes = [_lane(record, table, (spans or {}).get(record.rank, {})) for record in records]
    calls = list(table)
    groups = _groups(records, findings, calls, lanes)
    killed = frozenset(record.rank for record in records if record.end is None)
    recorded = [mark for record in records for mark in record.marks if mark.kind != VALUES]
    told = _once(recorded, marks)
    times = [time for lane in lanes if lane.times for time in (lane.times[0], lane.times[-1])]
    times += [mark.time for mark in (*told, *(mark for record in records for mark in record.marks))]
    return Timeline(
        max([record.world_size for record in records] or [0]),
        lanes,
        calls,
        groups,
        message_pairs(records),
        sorted([*_labels(lanes, calls, groups, killed), *_values(records, killed)], key=lambda key: not key.differs),
        told,
        findings,
        min(times, default=0.0),
        max(times, default=0.0),
        notes,
        not_compared(records),
        assumed(records),
        _places(findings, records),
    )


def _places(findings: Sequence[GuardFinding], records: Sequence[RankRecord]) -> list[dict[int, int]]:
    """By the event itself: numbers begin again with each guard of a program."""
    found: list[dict[int, int]] = [{} for _ in findings]
    for record in records:
        about = {id(finding.by_rank.get(record.rank)): places for finding, places in zip(findings, found, strict=True)}
        for place, event in enumerate(record.events if findings else ()):
            if id(event) in about:
                about[id(event)][record.rank] = place
    return found


def _lane(record: RankRecord, table: dict[CallSite, int], spans: Mapping[int, Span]) -> Lane:
    lane = Lane(record.rank, array("d"), array("L"), array("Q"), record.complete, _end_of(record), spans)
    known: dict[tuple[object, ...], int] = {}
    now = 0.0
    for event in record.events:
        key = event.group, event.digest, event.label, event.site, event.read_source, event.pieces, event.peer, event.tag
        number = known.get(key)
        if number is None:
            number = known[key] = table.setdefault(_call_of(event), len(table))
        if now < event.started < math.inf:
            now = event.started
        lane.times.append(now)
        lane.calls.append(number)
        lane.seqs.append(min(max(event.seq, 0), (1 << 53) - 1))
    return lane


def _call_of(event: Event) -> CallSite:
    pieces = f", {event.pieces}" if event.pieces else ""
    return CallSite(
        event.group,
        f"{event}{pieces}",
        event.signature.op,
        event.label,
        str(event.site),
        event.source,
        event.is_message,
    )


def _end_of(record: RankRecord) -> str:
    if record.end is None:
        return "its record ends without a word: the process was killed, hangs, or still runs" if record.run else ""
    return "" if record.end == "left" else f"left by {record.end}"


def _groups(
    records: Sequence[RankRecord], findings: Sequence[GuardFinding], calls: Sequence[CallSite], lanes: Sequence[Lane]
) -> dict[str, Group]:
    described = {name: given for record in records for name, given in record.groups.items()}
    cuts: dict[str, int] = {}
    for finding in findings:
        if finding.kind != DOUBT:
            cuts[finding.group] = min(finding.seq, cuts.get(finding.group, finding.seq))
    everyone = tuple(lane.rank for lane in lanes)
    return {
        name: Group(
            name,
            described[name]["words"] if name in described else f"group {name!r}",
            tuple(described[name]["ranks"]) if name in described else everyone,
            cuts.get(name),
        )
        for name in {**described, **{call.group: None for call in calls}}
    }


def _once(recorded: Sequence[Mark], beside: Sequence[Mark]) -> list[Mark]:
    """By time. All ranks tell of what they found together: the first of these stays.

    A record's own before that of a file ``beside``, whose time may be of another clock, and in whole seconds.
    """
    found: dict[object, Mark] = {}
    for mark in (*sorted(recorded, key=_time_of), *sorted(beside, key=_time_of)):
        found.setdefault((mark.kind, mark.step, mark.ranks, mark.text if mark.step is None else ""), mark)
    return sorted(found.values(), key=_time_of)


def _labels(
    lanes: Sequence[Lane], calls: Sequence[CallSite], groups: Mapping[str, Group], killed: frozenset[int]
) -> list[Key]:
    """What ranks called the tensors of their collectives; what torch issues by itself has no name of its own."""
    rows: dict[tuple[str, str], dict[int, Cell]] = {}
    group_of = [call.group for call in calls]
    newest = _common_numbers(lanes, group_of)
    known: dict[str, set[int]] = {name: set() for name in groups}
    for lane in lanes:
        for name in {group_of[number] for number in set(lane.calls)} if not lane.complete else groups:
            known[name].add(lane.rank)
        for number, (count, first, last) in _uses(lane, group_of, newest).items():
            call = calls[number]
            if call.label is None or call.label == BY_TORCH or call.is_message:
                continue
            cells = rows.setdefault((call.label, call.group), {})
            cell = cells.get(lane.rank)
            before = (0, first, last) if cell is None else (cell.count, cell.first_time, cell.last_time)
            cells[lane.rank] = Cell(before[0] + count, min(before[1], first), max(before[2], last))
    takers = {name: tuple(rank for rank in group.ranks if rank in known[name]) for name, group in groups.items()}
    return [
        Key(name, groups[group].words, takers[group], cells, _fewer(cells, killed))
        for (name, group), cells in rows.items()
    ]


def _common_numbers(lanes: Sequence[Lane], group_of: Sequence[str]) -> dict[str, int]:
    """Group -> the first number that all ranks still have, where some has dropped older ones."""
    newest: dict[str, int] = {}
    for lane in lanes:
        firsts: dict[str, int] = {}
        if not lane.complete:
            for number, seq in zip(lane.calls, lane.seqs, strict=True):
                firsts.setdefault(group_of[number], seq)
        newest |= {group: max(seq, newest.get(group, seq)) for group, seq in firsts.items()}
    return newest


def _uses(lane: Lane, group_of: Sequence[str], newest: Mapping[str, int]) -> dict[int, tuple[int, float, float]]:
    """Call -> how often, first, last. Of a group from ``newest`` on."""
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}
    counts: dict[int, int] = {}
    waiting = dict(newest)
    for call, time, seq in zip(lane.calls, lane.times, lane.seqs, strict=True):
        if waiting and (group := group_of[call]) in waiting:
            if seq < waiting[group]:
                continue
            del waiting[group]
        firsts.setdefault(call, time)
        lasts[call] = time
        counts[call] = counts.get(call, 0) + 1
    return {call: (count, firsts[call], lasts[call]) for call, count in counts.items()}


def _fewer(cells: Mapping[int, Cell], killed: frozenset[int]) -> tuple[int, ...]:
    """A rank that was killed may lack the last round, and that alone is no difference."""
    most = max(cell.count for cell in cells.values())
    return tuple(rank for rank, cell in cells.items() if cell.count < most - (rank in killed))


def _values(records: Sequence[RankRecord], killed: frozenset[int]) -> list[Key]:
    """What ranks put into reductions that were asked for each rank's values; not what is None on all of them."""
    told: dict[str, dict[int, list[Mark]]] = {}
    for record in records:
        for mark in (mark for mark in record.marks if mark.kind == VALUES):
            told.setdefault(mark.text, {}).setdefault(record.rank, []).append(mark)
    cut = {record.rank for record in records if not record.complete}
    found = []
    for place, marks_of in told.items():
        rows: dict[str, dict[int, Cell]] = {}
        common = min(map(len, marks_of.values())) if cut & set(marks_of) else 0  # 0: all of them
        for rank, marks in marks_of.items():
            for mark in marks[-common:]:
                for name, value in mark.values.items():
                    if value is not None:
                        cell = rows.setdefault(name, {}).setdefault(rank, Cell(0, mark.time, mark.time))
                        cell.count, cell.last_time = cell.count + 1, mark.time
                        cell.series.append((mark.time, value))
        words = f"reduction {place!r}"
        found += [Key(name, words, tuple(marks_of), cells, _fewer(cells, killed)) for name, cells in rows.items()]
    return found
