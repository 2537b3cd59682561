"""The report as text, as an HTML page, and as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

The page is one file, which needs no network, no font and no library: ``page.html``, whose ``{{...}}`` are filled in
here. Its data is one JSON text, compressed, in base64: nothing that a record says is markup or script in the file, and
the page writes it as text only. Its Content-Security-Policy lets nothing run but the page's own script, by its hash.

In the trace each rank has a track. A collective lasts until the next one of its rank, at most `_LONGEST_SEC` or as long
as the Flight Recorder saw it: the guard records when a collective was asked for, not when it ended. Arrows join what
ranks did together, in the order in which they came: the members of a collective until the first divergence of their
group, and a message's sender and receiver.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from ddpstats._base.text import count_of, holders_lines, printable, ranks_text, shorten, strict_json
from ddpstats.guard.event import Event
from ddpstats.guard.record import RankRecord, message_pairs
from ddpstats.report.flight_recorder import Span, Spans
from ddpstats.report.timeline import Recorded

_SHOWN_KEYS, _SHOWN_MARKS, _SHOWN_STATES = 16, 16, 8
_SHOWN_VALUES = 1000  # of one rank and path on the page; more where they are not finite
_LONGEST_SEC = 1e-3
_TEMPLATE = Path(__file__).with_name("page.html")

ReportRow = Mapping[str, Any]  # of a list of a report, or the report as `report_of` returns it
# A number for all events that differ in nothing but their own number and time, and one of them.
_NumberedEvents = dict[tuple[object, ...], tuple[int, Event]]


# -- text -------------------------------------------------------------------------------------------------------------


def as_text(report: ReportRow) -> str:
    """Return the report for people."""
    notes = [f"note: {printable([note])}" for note in report["notes"]]  # of files whose names are not ours
    lines = [*_collectives(report), *_marks(report["marks"]), *_keys(report["keys"]), *notes]
    return "\n".join(lines).lstrip("\n")


def _collectives(report: ReportRow) -> Iterator[str]:
    ranks, began = report["ranks"], report["began"]
    if ranks:
        of_run = f" of the run of {_utc(began):%Y-%m-%d %H:%M:%S} UTC" if began else ""
        yield f"{len(ranks)} of {report['world_size']} ranks left a record{of_run}:"
    for row in ranks:
        among = f", among them {count_of(row['messages'], 'messages')}" if row["messages"] else ""
        cut = "" if row["complete"] else " (the newest; older ones were dropped)"
        states = [f"{count:,} {state}" for state, count in row["states"].items()]
        seen = f"; the Flight Recorder saw {shorten(states, _SHOWN_STATES)}" if states else ""
        end = f"; {row['end']}" if row["end"] else ""
        yield f"  rank {row['rank']}: {row['collectives']} collectives{among}{cut}{seen}{end}"
    for finding in report["findings"]:
        yield f"\n{finding['message']}"
        states_of = {int(rank): _state(event) for rank, event in finding["by_rank"].items() if "state" in event}
        yield from ["The Flight Recorder saw it as:", *holders_lines(states_of)] if states_of else []
    yield from [f"\n{report['verdict']}"] if report["verdict"] else []
    yield from (f"not compared: {what}" for what in report["not_compared"])
    yield from report["assumed"]


def _state(event: ReportRow) -> str:
    duration = "" if event["seconds"] is None else f", {event['seconds'] * 1e3:.6g} ms"
    return f"{event['state']}{duration}"


def _marks(marks: Sequence[ReportRow]) -> Iterator[str]:
    for mark in marks[:_SHOWN_MARKS]:
        step = f", step {mark['step']}" if "step" in mark else ""
        ranks = f" on {ranks_text(mark['ranks'])}" if "ranks" in mark else ""
        yield f"\n{_utc(mark['time']):%H:%M:%S}  {printable([mark['mark']])}{ranks}{step}:"
        yield from (f"  {line}" for line in mark.get("text", "").splitlines())
    if len(marks) > _SHOWN_MARKS:
        yield f"and {len(marks) - _SHOWN_MARKS:,} more, which --json has"


def _keys(keys: Sequence[ReportRow]) -> Iterator[str]:
    differing = [key for key in keys if key["missing_ranks"] or key["fewer_ranks"]]
    with_values = [key for key in keys if any(cell["series"] for cell in key["by_rank"].values())]
    heading = f"{count_of(len(keys), 'keys')}, {len(differing)} different between ranks:"
    yield from _list_keys(heading, differing, lambda cell: count_of(cell["count"], "times"))
    yield from _list_keys("Last values by rank:", with_values, _last)


def _list_keys(heading: str, keys: Sequence[ReportRow], words_of: Callable[[ReportRow], str]) -> Iterator[str]:
    if keys:
        yield f"\n{heading}"
    for key in keys[:_SHOWN_KEYS]:
        yield f"  {key['key']!r} ({key['used_in']}):"
        words = {int(rank): words_of(cell) for rank, cell in key["by_rank"].items()}
        yield from (f"  {line}" for line in holders_lines(words | dict.fromkeys(key["missing_ranks"], "never")))
    if len(keys) > _SHOWN_KEYS:
        yield f"  and {len(keys) - _SHOWN_KEYS:,} more, which --json and --html have"


def _last(cell: ReportRow) -> str:
    values = count_of(len(cell["series"]), "values")
    bad = f", {cell['not_finite']:,} of {values} not finite" if cell["not_finite"] else ""
    return f"{cell['series'][-1][1]:.6g}{bad}"


def _utc(seconds: float) -> datetime:
    """Return a time that is the same for ranks of several hosts."""
    return datetime.fromtimestamp(min(seconds, 2e11), timezone.utc)


# -- a page -----------------------------------------------------------------------------------------------------------


def page_of(recorded: Recorded, report: ReportRow) -> str:
    """Return HTML, which holds the text as well: for people without a script, or with a screen reader."""
    page = _TEMPLATE.read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head, middle, tail = re.split("{{text}}|{{data}}", page.replace("{{hash}}", allowed))
    data = json.dumps(_page_data(recorded, report), separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(data, 6)).decode()
    return "".join([head, escape(as_text(report)), middle, packed, tail])


def _page_data(recorded: Recorded, report: ReportRow) -> dict[str, Any]:
    """Return the report and the events: of each rank columns, of all that is equal but times and numbers one call."""
    calls: _NumberedEvents = {}
    marks = [*recorded.marks, *(mark for record in recorded.records for mark in record.marks)]
    times = [event.started for record in recorded.records for event in record.events] + [mark.time for mark in marks]
    began, ended = min(times, default=0.0), max(times, default=0.0)
    return {
        "report": strict_json({**report, "keys": list(map(_thin_key, report["keys"]))}),
        "began": began,
        "seconds": ended - began,
        "messages": message_pairs(recorded.records),
        "lanes": [_lane(record, recorded.spans.get(record.rank, {}), began, calls) for record in recorded.records],
        "calls": [_call(event) for _, event in calls.values()],
    }


def _lane(record: RankRecord, spans: Spans, began: float, calls: _NumberedEvents) -> dict[str, Any]:
    """Return a rank's events: by how many microseconds, and by how much in number, each is above the one before it.

    A call that is new is added to ``calls``.
    """
    events, numbers = record.events, []
    for event in events:
        same = event.digest, event.signature.shapes, event.label, event.pieces, event.peer, event.tag
        call = event.group, event.site, event.read_source, *same
        numbers.append(calls.setdefault(call, (len(calls), event))[0])
    keys = [(event.group, event.started) for event in events]
    return {
        "rank": record.rank,
        "time": _steps(round((event.started - began) * 1e6) for event in events),
        "call": numbers,
        "seq": _steps(event.seq for event in events),
        "spans": {index: spans[key] for index, key in enumerate(keys) if key in spans},
    }


def _steps(numbers: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *numbers])]


def _call(event: Event) -> dict[str, Any]:
    fields = {"group": event.group, "op": printable([event.signature.op]), "label": event.label}
    call = f"{event}, {event.pieces}".removesuffix(", ")
    return {**fields, "call": call, "site": event.site, "source": event.source, "message": event.is_message}


def _thin_key(key: ReportRow) -> dict[str, Any]:
    cells = {rank: {**cell, "series": _thin(cell["series"])} for rank, cell in key["by_rank"].items()}
    return {**key, "by_rank": cells}


def _thin(series: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return of very many the first and the last, each that is not finite, and each stretch's least and largest."""
    size = -(-len(series) // (_SHOWN_VALUES // 2))
    if size <= 2:
        return series
    kept = {series[0], series[-1]}
    for start in range(0, len(series), size):
        stretch = series[start : start + size]
        finite = sorted((use for use in stretch if math.isfinite(use[1])), key=itemgetter(1))
        kept.update(set(stretch).difference(finite), finite[:1], finite[-1:])
    return sorted(kept)


# -- a trace ----------------------------------------------------------------------------------------------------------


def trace_of(recorded: Recorded, report: ReportRow) -> Iterator[str]:
    """Yield the JSON text of the trace in pieces."""
    names = [("process_name", 0, "ddpstats report")]
    names += [("thread_name", record.rank, f"rank {record.rank}") for record in recorded.records]
    first = [{"ph": "M", "pid": 1, "tid": rank, "name": name, "args": {"name": text}} for name, rank, text in names]
    yield '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(map(json.dumps, first))
    for rank, time, fields in _trace_events(recorded, report):
        at = {"pid": 1, "tid": rank, "ts": round(time * 1e6, 3)}
        yield ",\n" + json.dumps({**at, **fields}, separators=(",", ":"))
    yield "\n]}\n"


def _trace_events(recorded: Recorded, report: ReportRow) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Yield (rank, time, the other fields) of each event in the trace."""
    for record in recorded.records:
        spans = recorded.spans.get(record.rank, {})
        ends = [*(event.started for event in record.events[1:]), math.inf]
        for event, end in zip(record.events, ends, strict=False):
            yield record.rank, event.started, _slice(event, end, spans.get((event.group, event.started)))
    for number, (name, events) in enumerate(_together(recorded, report), 1):
        for index, (time, rank) in enumerate(events):
            phase = "s" if index == 0 else "f" if index == len(events) - 1 else "t"
            yield rank, time, {"ph": phase, "bp": "e", "id": number, "name": name, "cat": "together"}
    for mark in report["marks"]:
        for rank in mark.get("ranks") or [record.rank for record in recorded.records]:
            yield rank, mark["time"], {"ph": "i", "s": "t", "name": mark["mark"], "cat": "mark", "args": mark}
    for finding in report["findings"]:
        instant = {"ph": "i", "s": "p", "name": finding["kind"], "cat": "finding", "args": {"text": finding["message"]}}
        yield from ((int(rank), event["time"], instant) for rank, event in finding["by_rank"].items())


def _slice(event: Event, end: float, span: Span | None) -> dict[str, Any]:
    seconds = _LONGEST_SEC if span is None or span.seconds is None else span.seconds
    args = {"number": event.seq, **_call(event), **(span._asdict() if span is not None else {})}
    duration = round(max(min(end - event.started, seconds), 0.0) * 1e6, 3)  # a clock may have been set back
    return {"ph": "X", "dur": duration, "name": args["label"] or args["op"], "cat": args["op"], "args": args}


def _together(recorded: Recorded, report: ReportRow) -> Iterator[tuple[str, list[tuple[float, int]]]]:
    """Yield a name, and (time, rank) of each event of what several ranks did together, as far as is known."""
    members: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for record in recorded.records:
        for event in record.events:
            cut = report["groups"][event.group]["cut"]
            if not event.is_message and (cut is None or event.seq < cut):
                members[f"{event.group}/{event.seq}"].append((event.started, record.rank))
    yield from ((name, sorted(events)) for name, events in members.items() if len(events) > 1)
    events_of = {record.rank: record.events for record in recorded.records}
    for sender, sent, receiver, received in message_pairs(recorded.records):
        ends = (sender, sent), (receiver, received)
        yield "message", [(events_of[rank][index].started, rank) for rank, index in ends]
