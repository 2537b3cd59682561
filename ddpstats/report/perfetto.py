"""The timeline as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

One track per rank. A collective lasts until the next one of its rank, at most `_LONGEST_SEC` or as long as the Flight
Recorder saw it: the guard records when a collective was asked for, not when it ended. Arrows join what ranks did
together, in the order in which they came: the members of a collective until the first divergence of their group, and a
message's sender and receiver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ddpstats.report.timeline import Lane, Timeline

_LONGEST_SEC = 1e-3
_PROCESS = 1


def trace_of(timeline: Timeline) -> Iterator[str]:
    """JSON text in pieces."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(_events(timeline)):
        yield ("" if not number else ",\n") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", 0, {"name": f"{len(timeline.lanes)} of {timeline.world_size} ranks"})
    for lane in timeline.lanes:
        yield _named("thread_name", lane.rank, {"name": f"rank {lane.rank}"})
        yield _named("thread_sort_index", lane.rank, {"sort_index": lane.rank})
        yield from _slices(timeline, lane)
    yield from _arrows(timeline)
    everyone = [lane.rank for lane in timeline.lanes]
    for mark in timeline.marks:
        for rank in mark.ranks or everyone:
            args = {"step": mark.step, "text": mark.text}
            yield {
                "ph": "i",
                "s": "t",
                **_at(timeline, mark.time, rank),
                "name": mark.kind,
                "cat": "mark",
                "args": args,
            }
    for finding in timeline.findings:
        for rank, event in finding.by_rank.items():
            name = f"{finding.kind}: {event}"
            at = _at(timeline, event.started, rank)
            yield {"ph": "i", "s": "p", **at, "name": name, "cat": "finding", "args": {"text": finding.message}}


def _named(what: str, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": rank, "name": what, "args": args}


def _at(timeline: Timeline, time: float, rank: int) -> dict[str, Any]:
    return {"pid": _PROCESS, "tid": rank, "ts": round((time - timeline.began) * 1e6, 3)}


def _slices(timeline: Timeline, lane: Lane) -> Iterator[dict[str, Any]]:
    last = len(lane.calls) - 1
    for place, (number, time) in enumerate(zip(lane.calls, lane.times, strict=True)):
        call, span = timeline.calls[number], lane.spans.get(place)
        until = lane.times[place + 1] - time if place < last else _LONGEST_SEC
        taken = span.seconds if span is not None and span.seconds is not None else _LONGEST_SEC
        args: dict[str, Any] = {"group": call.group, "number": lane.seqs[place], "call": call.what, "site": call.site}
        args |= {"source": call.source} if call.source else {}
        args |= {"state": span.state, "seconds": span.seconds} if span is not None else {}
        slice_ = {"ph": "X", **_at(timeline, time, lane.rank), "dur": round(min(until, taken) * 1e6, 3)}
        yield {**slice_, "name": call.label or call.op, "cat": call.op, "args": args}


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    number = 0
    for group, seq, events in timeline.meetings():
        number += 1
        yield from _arrow(timeline, f"{group.name}/{seq}", number, [(time, rank) for time, rank, _ in events])
    times = {lane.rank: lane.times for lane in timeline.lanes}
    for source, sent, to, received in timeline.messages:
        number += 1
        yield from _arrow(timeline, "message", number, [(times[source][sent], source), (times[to][received], to)])


def _arrow(timeline: Timeline, name: str, number: int, ends: Sequence[tuple[float, int]]) -> Iterator[dict[str, Any]]:
    for place, (time, rank) in enumerate(ends):
        phase = "s" if place == 0 else "f" if place == len(ends) - 1 else "t"
        bound = {"bp": "e"} if phase == "f" else {}
        yield {"ph": phase, **bound, **_at(timeline, time, rank), "id": number, "name": name, "cat": "together"}
