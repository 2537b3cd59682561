"""The flight records of all ranks as they are read: files of JSON lines, which outlive a process however it ends.

`read_records` checks the bytes of each rank's file, `diagnose` matches them: what the guard would have said.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ddpstats._base.files import LATEST_TIME_SEC, bounded_lines, explain_version, open_regular, parse_json
from ddpstats._base.marks import Mark
from ddpstats._base.text import count_of, ranks_text
from ddpstats.guard.diagnosis import (
    LEFT,
    NOTHING,
    Alarm,
    GuardFinding,
    MessagePair,
    RankStatus,
    find,
    find_unmatched,
    message_mismatch,
    pair_messages,
)
from ddpstats.guard.event import MESSAGES, Event, Evidence, MessageNumbers, event_of, line_of, newest_in_a_row, text_of

FORMAT = 1
MAX_LINE_BYTES = 1 << 20
MAX_BYTES = 32 << 20  # of both files together
_MOST_RANKS = 1 << 31
_MAX_FILE_BYTES = 2 * MAX_BYTES  # that are read
_NUMBER, _TIME = re.compile(rb"0|[1-9]\d{0,15}"), re.compile(rb"(\d{1,12}(?:\.\d{1,12})?)([,}].*\n)", re.DOTALL)


@dataclass(frozen=True)
class RankRecord:
    """One rank's record. ``end`` says how the rank left, if it left: "left", or an error.

    ``run`` names the program, ``started`` is when its last guard began: seconds since 1970.
    """

    run: str
    started: float
    rank: int
    world_size: int
    groups: Mapping[str, Mapping[str, Any]]
    events: tuple[Event, ...]
    end: str | None
    complete: bool
    marks: tuple[Mark, ...] = ()

    @cached_property
    def messages(self) -> Sequence[tuple[int, Event]]:
        """Return (index among the events, event) of each message, with its number: 0 where older lines were dropped."""
        numbers = MessageNumbers()
        return [
            (index, replace(event, seq=numbers.next(event) if self.complete else 0))
            for index, event in enumerate(self.events)
            if event.is_message
        ]

    @cached_property
    def events_by_group(self) -> Mapping[str, list[Event]]:
        by_group: dict[str, list[Event]] = {}
        for event in self.events:
            by_group.setdefault(event.group, []).append(event)
        return by_group


class NoRecord(ValueError):
    """Raised where there is no record, or one that holds nothing yet."""


def read_records(*directories: str | Path, notes: list[str] | None = None) -> list[RankRecord]:
    """Return the records of all ranks of the newest run, by rank; directories may hold those of older ones.

    What was left out is appended to ``notes``. Raises ValueError, naming the file and line, for a malformed file, for a
    rank that has two, and `NoRecord` where no record exists.
    """
    paths = [path for directory in directories for path in sorted(Path(directory).glob("rank*.jsonl"))]
    newer = dict.fromkeys(path.with_name(path.name.replace(".old.", ".")) for path in paths)
    records = [(path, record) for path in newer for record in _read_if_begun(path, [] if notes is None else notes)]
    if not records:
        raise NoRecord(f"{', '.join(map(str, directories))} holds no rank*.jsonl, so no record of ddpstats")
    newest = max((record for _, record in records), key=lambda record: record.started).run
    by_rank: dict[int, tuple[Path, RankRecord]] = {}
    for path, record in records:
        if record.run == newest and by_rank.setdefault(record.rank, (path, record))[0] != path:
            raise ValueError(f"{by_rank[record.rank][0]} and {path} are both of rank {record.rank}: remove one")
    return [by_rank[rank][1] for rank in sorted(by_rank)]


def _read_if_begun(path: Path, notes: list[str]) -> Iterator[RankRecord]:
    """Yield the record whose newer file is at ``path``, also where a process was killed before it began that."""
    try:
        record = _read_rank(path)
    except NoRecord as error:
        notes.append(f"{path} is left out: {error}")
    except OSError as error:
        raise ValueError(f"{error.strerror}: {error.filename or path}") from None
    else:
        if path.name == f"rank{record.rank}.jsonl":
            yield record
        else:
            notes.append(f"{path} is left out: it is a record of rank {record.rank}")


def _read_rank(path: Path) -> RankRecord:
    old = path.with_suffix(".old.jsonl")
    head: Mapping[str, Any] | None = None
    end: str | None = None
    groups: dict[str, Mapping[str, Any]] = {}
    events: list[Event] = []
    marks: list[Mark] = []
    known: dict[Any, Event] = {}
    before: Evidence | None = None  # of the last event
    sources = [source for source in (old, path) if os.path.lexists(source)]
    for source in sources:
        for number, line in raw_lines(source):
            before_number, _, from_number = line.partition(b'"seq":')
            number_text, _, behind_number = from_number.partition(b",")
            before_time, _, from_time = behind_number.rpartition(b'"time":')
            seq, time = _NUMBER.fullmatch(number_text), _TIME.fullmatch(from_time)
            rest = time and (before_number, before_time, time[2], before)  # which most lines share
            if seq and time and rest in known:
                events.append(event_of((known[rest], int(seq[0]), float(time[1]))))
                before = events[-1].evidence or before
                continue
            try:
                entry = parse_line(line)
                if "op" in entry:
                    events.append(Event.from_dict(entry, before))
                    known[rest] = events[-1]
                    before = events[-1].evidence or before
                elif "mark" in entry:
                    marks.append(mark_from_dict(entry))
                elif "ddpstats" in entry:
                    head, end, before = check_head(entry), None, None
                elif "new_group" in entry:
                    groups[text_of(entry["new_group"])] = check_group(entry)
                elif "end" in entry:
                    end = line_of(entry["end"])
            except (ValueError, TypeError) as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if head is None:
        raise NoRecord("the process had not written a whole line when it ended, or it is no record")
    return RankRecord(
        head.get("run", ""),
        float(head.get("time", 0.0)),
        head["rank"],
        head["world_size"],
        groups,
        tuple(events),
        end,
        old not in sources,
        tuple(marks),
    )


def check_head(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    refused = explain_version(entry["ddpstats"], FORMAT)
    if refused is not None:
        raise ValueError(refused)
    if not all(type(entry.get(key)) is int and 0 <= entry[key] < _MOST_RANKS for key in ("rank", "world_size")):
        raise ValueError("the first line lacks a rank or a world size")
    is_time = type(entry.get("time", 0.0)) in (int, float) and abs(entry.get("time", 0.0)) < LATEST_TIME_SEC
    if type(entry.get("run", "")) is not str or not is_time:
        raise ValueError("the first line lacks a run or a time")
    return entry


def check_group(entry: Mapping[str, Any]) -> dict[str, Any]:
    ranks = msgspec.convert(entry.get("ranks"), Annotated[list[int], msgspec.Meta(min_length=1)])
    if len(set(ranks)) != len(ranks):
        raise ValueError("a group that has a rank twice")
    return {"ranks": ranks, "words": line_of(entry.get("words", entry["new_group"]))}


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_regular(path) as file:
        size, number = os.fstat(file.fileno()).st_size, 0
        if size > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size:,} bytes, and no record has more than {_MAX_FILE_BYTES:,}")
        try:
            for line in bounded_lines(file, MAX_LINE_BYTES):
                if not line.endswith(b"\n"):
                    return  # the process was killed in the middle of it
                number += 1
                yield number, line
        except ValueError as error:
            raise ValueError(f"{path}, line {number + 1}: {error}") from None


def parse_line(line: bytes) -> dict[str, Any]:
    return msgspec.convert(parse_json(line), dict[str, Any])


# -- marks ------------------------------------------------------------------------------------------------------------


def mark_as_dict(mark: Mark) -> dict[str, Any]:
    """Return a mark as a line of a record, or of a report, holds it."""
    values = {
        name: value if value is None or math.isfinite(value) else str(value) for name, value in mark.values.items()
    }
    optional = {"step": mark.step, "ranks": list(mark.ranks), "text": mark.text, "values": values}
    held = {key: value for key, value in optional.items() if value or value == 0}
    return {"mark": mark.kind, "time": mark.time, **held}


_Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class _MarkLine(msgspec.Struct):
    """A mark as a line of a record holds it."""

    mark: str
    time: Annotated[float, msgspec.Meta(ge=0, lt=LATEST_TIME_SEC)]
    text: str = ""
    step: int | None = None
    ranks: tuple[int, ...] = ()
    values: dict[str, _Finite | bool | Literal["nan", "inf", "-inf"] | None] = {}


def mark_from_dict(content: Mapping[str, Any]) -> Mark:
    """Read what `mark_as_dict` wrote. Raises ValueError for anything that it does not write."""
    line = msgspec.convert(content, _MarkLine)
    values = {name: None if value is None else float(value) for name, value in line.values.items()}
    return Mark(line.mark, line.text, line.time, line.step, line.ranks, values)


# -- diagnosis of the records of all ranks -----------------------------------------------------------------------------


def diagnose(records: Sequence[RankRecord]) -> list[GuardFinding]:
    """Return what went wrong first in each group, by time."""
    findings = [_in_group(name, group, records) for name, group in groups_of(records).items()]
    findings.append(message_mismatch(_messages_of(records)) or _not_through(records))
    real = [finding for finding in findings if finding is not None and finding.kind != NOTHING]
    return sorted(real, key=lambda finding: min((e.started for e in finding.by_rank.values()), default=0.0))


def groups_of(records: Sequence[RankRecord]) -> dict[str, Mapping[str, Any]]:
    """Return the words and the ranks of each group: those that used it where no record describes it."""
    return {**_find_undescribed(records), **_describe_groups(records)}


def say_gaps(records: Sequence[RankRecord]) -> list[str]:
    """Return a sentence for each thing that ranks may have done differently without `diagnose` finding it."""
    known = {record.rank for record in records}
    asked = {rank for group in _describe_groups(records).values() for rank in group["ranks"]}
    absent = max((record.world_size for record in records), default=0) - len(known | asked)
    cut = [record.rank for record in records if not record.complete and record.messages]
    sentences = [
        f"{group['words']}: no record says which ranks belong to it, and only {ranks_text(group['ranks'])} used it"
        for group in _find_undescribed(records).values()
        if len(group["ranks"]) == 1
    ]
    if absent > 0:
        sentences.append(f"{count_of(absent, 'ranks')} without a record, of which no group is known")
    if cut:
        sentences.append(f"messages of {ranks_text(cut)}: older ones were dropped, so they cannot be counted")
    return sentences


def say_guesses(records: Sequence[RankRecord]) -> list[str]:
    """Return a sentence for each thing that `diagnose` assumed where it found nothing."""
    alone = [
        f"{ranks_text([rank.rank])}: {event}{event.at}: {ranks_text([peer.rank])} recorded nothing that goes with it"
        for rank, event, peer, may_wait in _find_unpaired(records)
        if not may_wait
    ]
    return alone + [
        f"{group['words']}: no record says which ranks belong to it; {ranks_text(group['ranks'])}, which used it, were "
        "compared"
        for group in _find_undescribed(records).values()
        if len(group["ranks"]) > 1
    ]


def _not_through(records: Sequence[RankRecord]) -> GuardFinding | None:
    """Return the first message that only one rank recorded, and may have waited for; receives come before sends."""
    alone = [(rank, event, peer) for rank, event, peer, may_wait in _find_unpaired(records) if may_wait]
    if not alone:
        return None
    rank, event, peer = min(alone, key=lambda entry: (entry[1].signature.op == "send", entry[1].started))
    group = event.group.removesuffix(MESSAGES)
    words = _describe_groups(records).get(group, {}).get("words", f"group {group!r}")
    return find_unmatched(event, rank.rank, words, _status_of(peer.rank, event.group, peer))


def message_pairs(records: Sequence[RankRecord]) -> list[MessagePair]:
    """Return the two sides of each message that both ranks recorded, by their index among a rank's events."""
    messages = {record.rank: record.messages for record in records}
    pairs = pair_messages(_messages_of(records))[0]
    return [(a, messages[a][sent][0], b, messages[b][received][0]) for a, sent, b, received in pairs]


def _messages_of(records: Sequence[RankRecord]) -> dict[int, list[Event]]:
    return {record.rank: [event for _, event in record.messages] for record in records}


def _find_unpaired(records: Sequence[RankRecord]) -> Iterator[tuple[RankRecord, Event, RankRecord, bool]]:
    """Yield (rank, message, the other rank, may wait) of the first message of each stream that the other lacks.

    Not where either has dropped older lines, nor where the receiver takes some from any rank: no number is known there.
    The rank may wait for the other where no collective came after the message, and a record breaks off. Otherwise the
    message came through, its other half outside of a guard, or the rank did not wait for it.
    """
    by_rank, streams = {record.rank: record for record in records if record.complete}, set()
    from_any = {
        (rank, event.group, event.tag)
        for rank, record in by_rank.items()
        for _, event in record.messages
        if event.peer is None
    }
    for rank, number in pair_messages(_messages_of(records))[1]:
        record = by_rank[rank]
        index, event = record.messages[number]
        receiver = event.peer if event.signature.op == "send" else rank
        stream = rank, event.signature.op, event.peer, event.group, event.tag
        if event.peer in by_rank and (receiver, event.group, event.tag) not in from_any and stream not in streams:
            streams.add(stream)
            peer = by_rank[event.peer]
            broke_off = bool(record.run) and not record.end == peer.end == "left"
            yield record, event, peer, broke_off and all(later.is_message for later in record.events[index:])


def _describe_groups(records: Sequence[RankRecord]) -> dict[str, Mapping[str, Any]]:
    return {name: group for record in records for name, group in record.groups.items()}


def _find_undescribed(records: Sequence[RankRecord]) -> dict[str, Mapping[str, Any]]:
    """Return the ranks that used each group that no record describes (any more); their order in it is not known."""
    described, ranks_of = _describe_groups(records), dict[str, list[int]]()
    for record in records:
        for name, events in record.events_by_group.items():
            if name not in described and not all(event.is_message for event in events):
                ranks_of.setdefault(name, []).append(record.rank)
    return {name: {"words": f"group {name!r}", "ranks": ranks, "order": ()} for name, ranks in ranks_of.items()}


def _in_group(name: str, described: Mapping[str, Any], records: Sequence[RankRecord]) -> GuardFinding | None:
    by_rank = {record.rank: record for record in records}
    statuses = [
        _status_of(rank, name, record)
        for rank in described["ranks"]
        if (record := by_rank.get(rank)) is None or record.complete or name in record.events_by_group
    ]  # what the others did there was dropped
    ranks = tuple(described.get("order", described["ranks"]))
    alarm = Alarm(name, described["words"], ranks, 0, overdue=False)
    return find(alarm, statuses) if statuses else None


def _status_of(rank: int, group: str, record: RankRecord | None) -> RankStatus:
    if record is None:
        return RankStatus(rank, left="wrote no record")
    events = record.events_by_group.get(group, [])
    last = record.events[-1] if record.events else None
    if record.end is None:
        left = "its record ends here (the process was killed, or hangs)"
    else:
        left = LEFT if record.end == "left" else f"{LEFT} by {record.end}"
    return RankStatus(
        rank,
        newest_in_a_row(events),
        events[-1].seq if events else 0,
        last=None if last is None else last.in_full(record.groups.get(last.group, {}).get("words", "")),
        left=left,
        messages=tuple(event for _, event in record.messages),
    )


def findings_as_json(findings: Sequence[GuardFinding]) -> list[dict[str, Any]]:
    return [
        {
            "kind": finding.kind,
            "group": finding.group,
            "seq": finding.seq,
            "missing_ranks": list(finding.missing),
            "culprit_ranks": list(finding.culprits),
            "by_rank": {str(int(rank)): event.as_dict() for rank, event in finding.by_rank.items()},
            "message": finding.message,
        }
        for finding in findings
    ]
