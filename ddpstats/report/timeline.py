"""`report_of` works out what the report says from what the ranks recorded. Text, page and trace show it.

1. ``findings``: the first divergence of each group, and what the Flight Recorder saw of it.
2. ``groups``: each has the number from which on its ranks did different things, ``cut``: numbers pair what ranks did
   until there, and nothing is known to belong together afterwards.
3. ``keys``: which path each rank has, how often and since when: by the labels of its collectives, and by what it put
   into reductions of ddpstats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from operator import attrgetter
from typing import Any, NamedTuple

from ddpstats._base.marks import VALUES, Mark
from ddpstats.guard.diagnosis import DOUBT, GuardFinding
from ddpstats.guard.event import BY_TORCH
from ddpstats.guard.record import RankRecord, diagnose, findings_as_json, groups_of, mark_as_dict, say_gaps, say_guesses
from ddpstats.report.flight_recorder import Spans

_NO_END = "its record has no end mark: the process was killed, hangs, or still runs"


class Recorded(NamedTuple):
    """A run as it was read. ``marks``: of files beside the records. ``notes``: what could not be used, and why."""

    records: Sequence[RankRecord]
    spans: Mapping[int, Spans]
    marks: Sequence[Mark]
    notes: Sequence[str]


def report_of(recorded: Recorded) -> dict[str, Any]:
    """Return what ``--json`` prints: all but the single events, which the trace has."""
    records, spans = recorded.records, recorded.spans
    findings = diagnose(records)
    groups = _groups(records, findings)
    of_records = [mark for record in records for mark in record.marks if mark.kind != VALUES]
    marks = list(map(mark_as_dict, _distinct(of_records, recorded.marks)))
    report = {
        "world_size": max([record.world_size for record in records], default=0),
        "began": min([record.events[0].started for record in records if record.events], default=0.0) or None,
        "ranks": [_rank(record, spans.get(record.rank, {})) for record in records],
        "groups": groups,
        "findings": _with_spans(findings_as_json(findings), spans),
        "marks": marks,
        "keys": sorted(_keys(records, groups), key=lambda key: not (key["missing_ranks"] or key["fewer_ranks"])),
        "not_compared": say_gaps(records),
        "assumed": say_guesses(records),
        "notes": recorded.notes,
    }
    # A doubt is no finding; that not all could be compared is one.
    is_clean = not marks and not report["not_compared"] and all(finding.kind == DOUBT for finding in findings)
    return {**report, "verdict": _verdict(report), "has_findings": not is_clean}


def _verdict(report: Mapping[str, Any]) -> str:
    """Return the sentence where no finding says more: all is well only where all was compared."""
    if report["findings"]:
        return ""
    if not any(rank["collectives"] for rank in report["ranks"]):
        return "No record of collectives."
    if report["not_compared"] or report["assumed"]:
        return "Nothing differs in what could be compared."
    return "All ranks issued the same collectives in the same order."


def _rank(record: RankRecord, spans: Spans) -> dict[str, Any]:
    end = "" if record.end == "left" else f"left by {record.end}"
    return {
        "rank": record.rank,
        "collectives": len(record.events),
        "messages": len(record.messages),
        "complete": record.complete,
        "end": end if record.end is not None else _NO_END if record.run else "",
        "states": dict(Counter(span.state for span in spans.values())),
    }


def _with_spans(findings: list[dict[str, Any]], spans: Mapping[int, Spans]) -> list[dict[str, Any]]:
    for finding in findings:
        for rank, event in finding["by_rank"].items():
            span = spans.get(int(rank), {}).get((event.get("group", ""), event["time"]))
            event |= span._asdict() if span is not None else {}
    return findings


def _groups(records: Sequence[RankRecord], findings: Sequence[GuardFinding]) -> dict[str, dict[str, Any]]:
    """Return words, ranks and ``cut`` of each group: None where its ranks agree."""
    cuts: dict[str, int] = {}
    for finding in findings:
        if finding.kind != DOUBT:
            cuts[finding.group] = min(finding.seq, cuts.get(finding.group, finding.seq))
    of_messages = {name: {"words": f"group {name!r}", "ranks": ()} for r in records for name in r.events_by_group}
    return {name: {**group, "cut": cuts.get(name)} for name, group in {**of_messages, **groups_of(records)}.items()}


def _distinct(of_records: Sequence[Mark], beside: Sequence[Mark]) -> list[Mark]:
    """Return the marks by time. Of what all ranks recorded together the first is kept.

    A record's own comes before that of a file ``beside``, whose time may be of another clock, and in whole seconds.
    """
    by_time, distinct = attrgetter("time"), dict[object, Mark]()
    for mark in (*sorted(of_records, key=by_time), *sorted(beside, key=by_time)):
        distinct.setdefault((mark.kind, mark.step, mark.ranks, mark.text if mark.step is None else ""), mark)
    return sorted(distinct.values(), key=by_time)


# -- keys -------------------------------------------------------------------------------------------------------------

# Rank -> name, time and, as far as known, value of each of its uses; of all ranks that take part.
_Uses = Mapping[int, Sequence[tuple[str, float, "float | None"]]]


def _keys(records: Sequence[RankRecord], groups: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    killed = {record.rank for record in records if record.end is None}
    for name, group in groups.items():
        yield from _keys_of(group["words"], killed, _labels(name, group["ranks"], records))
    for name in {mark.text: None for record in records for mark in record.marks if mark.kind == VALUES}:
        yield from _keys_of(f"reduction {name!r}", killed, _values(name, records))


def _keys_of(used_in: str, killed: set[int], uses: _Uses) -> Iterator[dict[str, Any]]:
    """Yield the keys of a group or a reduction. A rank that was killed may lack the last round: no difference."""
    by_name: dict[str, dict[int, list[tuple[float, float | None]]]] = {}
    for rank, of_rank in uses.items():
        for name, time, value in of_rank:
            by_name.setdefault(name, {}).setdefault(rank, []).append((time, value))
    for name, by_rank in by_name.items():
        most = max(map(len, by_rank.values()))
        yield {
            "key": name,
            "used_in": used_in,
            "missing_ranks": [rank for rank in uses if rank not in by_rank],
            "fewer_ranks": [rank for rank, times in by_rank.items() if len(times) < most - (rank in killed)],
            "by_rank": {str(rank): _cell(by_rank[rank]) for rank in sorted(by_rank)},
        }


def _cell(uses: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    times, series = [time for time, _ in uses], [(time, value) for time, value in uses if value is not None]
    not_finite = sum(not math.isfinite(value) for _, value in series)
    count, first, last = len(uses), min(times), max(times)
    return {"count": count, "first_time": first, "last_time": last, "series": series, "not_finite": not_finite}


def _labels(name: str, ranks: Sequence[int], records: Sequence[RankRecord]) -> _Uses:
    """Return what ranks called the tensors of their collectives there, from the first number that all still have."""
    known = [r for r in records if r.rank in ranks and (r.complete or name in r.events_by_group)]
    events_of = {record.rank: record.events_by_group.get(name, []) for record in known}
    first = max((events_of[record.rank][0].seq for record in known if not record.complete), default=0)
    return {
        rank: [
            (str(event.label), event.started, None)
            for event in dropwhile(lambda event: event.seq < first, events)
            if event.label not in (None, BY_TORCH) and not event.is_message  # what torch issues has no name
        ]
        for rank, events in events_of.items()
    }


def _values(name: str, records: Sequence[RankRecord]) -> _Uses:
    """Return what ranks put into a reduction by that name; as many of the newest as all ranks still have."""
    of_all = {r.rank: [mark for mark in r.marks if (mark.kind, mark.text) == (VALUES, name)] for r in records}
    marks_of = {rank: marks for rank, marks in of_all.items() if marks}
    is_cut = any(not record.complete for record in records if record.rank in marks_of)
    common = min(map(len, marks_of.values())) if is_cut else 0  # 0: all of them
    return {
        rank: [(path, mark.time, v) for mark in marks[-common:] for path, v in mark.values.items() if v is not None]
        for rank, marks in marks_of.items()
    }
