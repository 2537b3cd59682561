"""The timeline as text, as JSON, and as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

In the trace each rank has a track. A collective lasts until the next one of its rank, at most `_LONGEST_SEC` or as long
as the Flight Recorder saw it: the guard records when a collective was asked for, not when it ended. Arrows join what
ranks did together, in the order in which they came: the members of a collective until the first divergence of their
group, and a message's sender and receiver.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from ddpstats._base.text import count_of, holders_lines, printable, ranks_text, shorten
from ddpstats.guard.event import Event
from ddpstats.guard.record import RankRecord, findings_as_json, mark_as_dict
from ddpstats.report.flight_recorder import Span
from ddpstats.report.timeline import Cell, Key, Timeline

_SHOWN_KEYS, _SHOWN_MARKS, _SHOWN_STATES = 16, 16, 8
_LONGEST_SEC = 1e-3


# -- text -------------------------------------------------------------------------------------------------------------


def as_text(timeline: Timeline) -> str:
    notes = [f"note: {printable([note])}" for note in timeline.notes]  # of files whose names are not ours
    return "\n".join([*_collectives(timeline), *_marks(timeline), *_keys(timeline), *notes]).lstrip("\n")


def _collectives(timeline: Timeline) -> Iterator[str]:
    began = _began(timeline)
    if timeline.records:
        of_run = f" of the run of {_utc(began):%Y-%m-%d %H:%M:%S} UTC" if began else ""
        yield f"{len(timeline.records)} of {timeline.world_size} ranks left a record{of_run}:"
    for record in timeline.records:
        among = f", among them {count_of(len(record.messages), 'messages')}" if record.messages else ""
        cut = "" if record.complete else " (the newest; older ones were dropped)"
        states = [f"{count:,} {state}" for state, count in _states(timeline, record).items()]
        seen = f"; the Flight Recorder saw {shorten(states, _SHOWN_STATES)}" if states else ""
        end = f"; {_end(record)}" if _end(record) else ""
        yield f"  rank {record.rank}: {len(record.events)} collectives{among}{cut}{seen}{end}"
    for number, finding in enumerate(timeline.findings):
        yield f"\n{finding.message}"
        states_of = {
            rank: span.state + ("" if span.seconds is None else f", {span.seconds * 1e3:.6g} ms")
            for rank, span in timeline.spans_of(number).items()
        }
        yield from ["The Flight Recorder saw it as:", *holders_lines(states_of)] if states_of else []
    yield from [f"\n{timeline.verdict}"] if timeline.verdict else []
    yield from (f"not compared: {what}" for what in timeline.not_compared)
    yield from timeline.assumed


def _began(timeline: Timeline) -> float:
    """Return when the run's first collective was; 0.0 if there was no collective."""
    return min((record.events[0].started for record in timeline.records if record.events), default=0.0)


def _states(timeline: Timeline, record: RankRecord) -> dict[str, int]:
    """Return how many of a rank's events the Flight Recorder saw in each state."""
    return dict(Counter(span.state for span in timeline.spans.get(record.rank, {}).values()))


def _end(record: RankRecord) -> str:
    if record.end is None:
        return "its record ends without a word: the process was killed, hangs, or still runs" if record.run else ""
    return "" if record.end == "left" else f"left by {record.end}"


def _marks(timeline: Timeline) -> Iterator[str]:
    for mark in timeline.marks[:_SHOWN_MARKS]:
        step = "" if mark.step is None else f", step {mark.step}"
        ranks = f" on {ranks_text(mark.ranks)}" if mark.ranks else ""
        yield f"\n{_utc(mark.time):%H:%M:%S}  {printable([mark.kind])}{ranks}{step}:"
        yield from (f"  {line}" for line in mark.text.splitlines())
    if len(timeline.marks) > _SHOWN_MARKS:
        yield f"and {len(timeline.marks) - _SHOWN_MARKS:,} more, which --json has"


def _keys(timeline: Timeline) -> Iterator[str]:
    differing = [key for key in timeline.keys if key.differs]
    known = [key for key in timeline.keys if any(cell.series for cell in key.cells.values())]
    heading = f"{count_of(len(timeline.keys), 'keys')}, {len(differing)} different between ranks:"
    yield from _listed(heading, differing, lambda cell: count_of(cell.count, "times"))
    yield from _listed("Last values by rank:", known, _last)


def _listed(heading: str, keys: Sequence[Key], words_of: Callable[[Cell], str]) -> Iterator[str]:
    if keys:
        yield f"\n{heading}"
    for key in keys[:_SHOWN_KEYS]:
        yield f"  {key.name!r} ({key.source}):"
        words = {rank: words_of(cell) for rank, cell in key.cells.items()}
        yield from (f"  {line}" for line in holders_lines(words | dict.fromkeys(key.missing, "never")))
    if len(keys) > _SHOWN_KEYS:
        yield f"  and {len(keys) - _SHOWN_KEYS:,} more, which --json and --html have"


def _last(cell: Cell) -> str:
    bad = f", {cell.not_finite:,} of {count_of(len(cell.series), 'values')} not finite" if cell.not_finite else ""
    return f"{cell.series[-1][1]:.6g}{bad}"


def _utc(seconds: float) -> datetime:
    """Return a time that is the same for ranks of several hosts."""
    return datetime.fromtimestamp(min(seconds, 2e11), timezone.utc)


# -- JSON -------------------------------------------------------------------------------------------------------------


def as_json(timeline: Timeline) -> dict[str, Any]:
    """Return all but the single events, which the trace has."""
    return {
        "world_size": timeline.world_size,
        "began": _began(timeline) or None,
        "ranks": [
            {"rank": record.rank, "collectives": len(record.events), "complete": record.complete}
            | {"end": _end(record), "states": _states(timeline, record)}
            for record in timeline.records
        ],
        "findings": _findings_as_json(timeline),
        "marks": list(map(mark_as_dict, timeline.marks)),
        "keys": list(map(_key_as_json, timeline.keys)),
        "verdict": timeline.verdict,
        "not_compared": timeline.not_compared,
        "assumed": timeline.assumed,
        "notes": timeline.notes,
    }


def _findings_as_json(timeline: Timeline) -> list[dict[str, Any]]:
    findings = findings_as_json(timeline.findings)
    for number, finding in enumerate(findings):
        for rank, span in timeline.spans_of(number).items():
            finding["by_rank"][str(rank)] |= span._asdict()
    return findings


def _key_as_json(key: Key) -> dict[str, Any]:
    by_rank = {str(rank): {**vars(cell), "not_finite": cell.not_finite} for rank, cell in sorted(key.cells.items())}
    fewer = {"missing_ranks": key.missing, "fewer_ranks": key.fewer}
    return {"key": key.name, "place": key.source, **fewer, "by_rank": by_rank}


# -- a trace ----------------------------------------------------------------------------------------------------------


def trace_of(timeline: Timeline) -> Iterator[str]:
    """Yield the JSON text of the trace in pieces."""
    process = {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "ddpstats report"}}
    yield '{"displayTimeUnit":"ms","traceEvents":[\n' + json.dumps(process)
    for rank, time, fields in _trace_events(timeline):
        at = {"pid": 1, "tid": rank, "ts": round((time - timeline.began) * 1e6, 3)}
        yield ",\n" + json.dumps({**at, **fields}, separators=(",", ":"))
    yield "\n]}\n"


def _trace_events(timeline: Timeline) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Yield (rank, time, the other fields) of each event in the trace."""
    began = timeline.began
    for record in timeline.records:
        yield record.rank, began, {"ph": "M", "name": "thread_name", "args": {"name": f"rank {record.rank}"}}
        spans = timeline.spans.get(record.rank, {})
        ends = [*(event.started for event in record.events[1:]), math.inf]
        for index, (event, end) in enumerate(zip(record.events, ends, strict=False)):
            yield record.rank, event.started, _slice(event, end, spans.get(index))
    for number, members in enumerate(_together(timeline), 1):
        for index, (time, rank, name) in enumerate(members):
            phase = "s" if index == 0 else "f" if index == len(members) - 1 else "t"
            yield rank, time, {"ph": phase, "bp": "e", "id": number, "name": name, "cat": "together"}
    for mark in timeline.marks:
        for rank in mark.ranks or [record.rank for record in timeline.records]:
            args = {"step": mark.step, "text": mark.text}
            yield rank, mark.time, {"ph": "i", "s": "t", "name": mark.kind, "cat": "mark", "args": args}
    for finding in timeline.findings:
        for rank, event in finding.by_rank.items():
            name, args = f"{finding.kind}: {event}", {"text": finding.message}
            yield rank, event.started, {"ph": "i", "s": "p", "name": name, "cat": "finding", "args": args}


def _slice(event: Event, end: float, span: Span | None) -> dict[str, Any]:
    seconds = _LONGEST_SEC if span is None or span.seconds is None else span.seconds
    args = {"group": event.group, "number": event.seq, "call": str(event), "site": event.site, "source": event.source}
    args |= span._asdict() if span is not None else {}
    duration = round(max(min(end - event.started, seconds), 0.0) * 1e6, 3)  # a clock may have been set back
    name, op = event.label or event.signature.op, event.signature.op
    return {"ph": "X", "dur": duration, "name": name, "cat": op, "args": args}


def _together(timeline: Timeline) -> Iterator[list[tuple[float, int, str]]]:
    """Yield (time, rank, name) of each event of what several ranks did together, as far as is known."""
    members: dict[str, list[tuple[float, int, str]]] = {}
    for record in timeline.records:
        for event in record.events:
            cut = timeline.groups[event.group].cut
            if not event.is_message and (cut is None or event.seq < cut):
                name = f"{event.group}/{event.seq}"
                members.setdefault(name, []).append((event.started, record.rank, name))
    yield from (sorted(ranks) for ranks in members.values() if len(ranks) > 1)
    events = {record.rank: record.events for record in timeline.records}
    for sender, sent, receiver, received in timeline.messages:
        ends = (sender, events[sender][sent]), (receiver, events[receiver][received])
        yield [(event.started, rank, "message") for rank, event in ends]
