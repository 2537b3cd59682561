"""``ddpstats report DIR``: where the ranks parted, from what they recorded: as text, JSON, a page, a trace.

Exit status 0 if all ranks did the same and nothing was marked, 1 if something was found or not all could be compared, 2
if it cannot be read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ddpstats._base.text import (
    VerbReport,
    check_writable,
    count_of,
    holders_lines,
    printable,
    ranks_text,
    shorten,
    write_file,
)
from ddpstats.guard.record import findings_as_json, mark_as_dict
from ddpstats.report.page import page_of
from ddpstats.report.perfetto import trace_of
from ddpstats.report.sources import read_timeline
from ddpstats.report.timeline import Cell, Key, Span, Timeline

_SHOWN_KEYS, _SHOWN_MARKS, _SHOWN_COUNTS = 16, 16, 8


EPILOG = """examples:
  ddpstats run --nproc 2 --guard record --record-dir records train.py; ddpstats report records
  ddpstats report records captures --html report.html     with what NaN capture wrote, as a page
  ddpstats report records --perfetto trace.json           for ui.perfetto.dev

exit status: 0 nothing found, 1 something found, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="+",
        type=Path,
        help="where the ranks wrote: records, Flight Recorder dumps, bundles of NaN capture, stats dumps",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="also a page to look at, which needs no network")
    parser.add_argument(
        "--perfetto", metavar="FILE", type=Path, help="also a trace for ui.perfetto.dev or chrome://tracing (JSON)"
    )


def run(args: argparse.Namespace) -> int:
    """Raises `DdpstatsError` for a directory that holds nothing to report of, or damaged records."""
    check_writable(args.html, args.perfetto)
    timeline = read_timeline(args.directories)
    report = VerbReport(int(timeline.has_findings), lambda: as_text(timeline), lambda: as_json(timeline))
    if args.html is not None:
        write_file(args.html, lambda file: file.writelines(page_of(timeline, as_text(timeline))))
    if args.perfetto is not None:
        write_file(args.perfetto, lambda file: file.writelines(trace_of(timeline)))
    return report.show(args.json)


def as_text(timeline: Timeline) -> str:
    lines = _collectives(timeline) if timeline.lanes else [timeline.verdict]
    notes = [f"note: {printable([note])}" for note in timeline.notes]  # of files whose names are not ours
    return "\n".join([*lines, *_marks(timeline), *_keys(timeline), *_values(timeline), *notes])


def _collectives(timeline: Timeline) -> list[str]:
    began = _began(timeline)
    of_run = f" of the run of {_utc(began):%Y-%m-%d %H:%M:%S} UTC" if began else ""
    lines = [f"{len(timeline.lanes)} of {timeline.world_size} ranks left a record{of_run}:"]
    for lane in timeline.lanes:
        cut = "" if lane.complete else " (the newest; older ones were dropped)"
        states = shorten((f"{count:,} {state}" for state, count in lane.states.items()), _SHOWN_COUNTS)
        seen = f"; the Flight Recorder saw {states}" if states else ""
        end = f"; {lane.end}" if lane.end else ""
        messages = sum(count for number, count in Counter(lane.calls).items() if timeline.calls[number].is_message)
        among = f", among them {count_of(messages, 'messages')}" if messages else ""
        lines.append(f"  rank {lane.rank}: {len(lane.calls)} collectives{among}{cut}{seen}{end}")
    lines.append("")
    for number, finding in enumerate(timeline.findings):
        lines += ["\n" + finding.message, *_states(timeline.spans_of(number))]
    lines += [timeline.verdict] if timeline.verdict else []
    return [*lines, *(f"not compared: {one}" for one in timeline.not_compared), *timeline.assumed]


def _began(timeline: Timeline) -> float:
    """The run: its first collective; 0.0 where there is none."""
    return min((lane.times[0] for lane in timeline.lanes if lane.times), default=0.0)


def _states(spans: Mapping[int, Span]) -> list[str]:
    """Of the collective of a finding."""
    told = {
        rank: span.state + ("" if span.seconds is None else f", {span.seconds * 1e3:.6g} ms")
        for rank, span in spans.items()
    }
    return ["The Flight Recorder saw it as:", *holders_lines(told)] if told else []


def _marks(timeline: Timeline) -> Iterator[str]:
    for mark in timeline.marks[:_SHOWN_MARKS]:
        where = "" if mark.step is None else f", step {mark.step}"
        who = f" on {ranks_text(mark.ranks)}" if mark.ranks else ""
        yield f"\n{_clock(mark.time)}  {printable([mark.kind])}{who}{where}:"
        yield from (f"  {line}" for line in mark.text.splitlines())
    if len(timeline.marks) > _SHOWN_MARKS:
        yield f"and {len(timeline.marks) - _SHOWN_MARKS:,} more, which --json has"


def _keys(timeline: Timeline) -> Iterator[str]:
    differing = [key for key in timeline.keys if key.differs]
    if not differing:
        return
    yield f"\n{count_of(len(timeline.keys), 'keys')}, {len(differing)} not alike on all ranks:"
    yield from (f"  {key.name!r} ({key.place}): {_who_has(key)}" for key in differing[:_SHOWN_KEYS])
    if len(differing) > _SHOWN_KEYS:
        yield f"  and {len(differing) - _SHOWN_KEYS:,} more, which --json and --html have"


def _values(timeline: Timeline) -> Iterator[str]:
    known = [key for key in timeline.keys if any(cell.series for cell in key.cells.values())]
    if not known:
        return
    yield "\nLast values by rank:"
    for key in known[:_SHOWN_KEYS]:
        yield f"  {key.name!r} ({key.place}):"
        yield from (f"  {line}" for line in holders_lines({rank: _last(cell) for rank, cell in key.cells.items()}))
    if len(known) > _SHOWN_KEYS:
        yield f"  and {len(known) - _SHOWN_KEYS:,} more, which --json and --html have"


def _last(cell: Cell) -> str:
    bad = f", {cell.not_finite:,} of {count_of(len(cell.series), 'values')} not finite" if cell.not_finite else ""
    return f"{cell.series[-1][1]:.6g}{bad}"


def _who_has(key: Key) -> str:
    ranks_of: dict[int, list[int]] = {}
    for rank, cell in key.cells.items():
        ranks_of.setdefault(cell.count, []).append(rank)
    told = []
    for count, ranks in sorted(ranks_of.items(), reverse=True)[:_SHOWN_COUNTS]:
        first = min(key.cells[rank].first_time for rank in ranks)
        last = max(key.cells[rank].last_time for rank in ranks)
        told.append(f"{ranks_text(ranks)}: {count_of(count, 'times')}, {_clock(first)} to {_clock(last)}")
    told += [f"not on {ranks_text(key.missing)}"] if key.missing else []
    return "; ".join(told)


def _clock(seconds: float) -> str:
    """With milliseconds, unless it is a whole second: bundles had no more before."""
    when = _utc(seconds)
    return when.strftime("%H:%M:%S.%f")[:-3] if when.microsecond else when.strftime("%H:%M:%S")


def _utc(seconds: float) -> datetime:
    """For ranks of several hosts."""
    return datetime.fromtimestamp(min(seconds, 2e11), timezone.utc)


def as_json(timeline: Timeline) -> dict[str, Any]:
    """All but the single events, which ``--perfetto`` has."""
    return {
        "world_size": timeline.world_size,
        "began": _began(timeline) or None,
        "ranks": [
            {
                "rank": lane.rank,
                "collectives": len(lane.calls),
                "complete": lane.complete,
                "end": lane.end,
                "states": lane.states,
            }
            for lane in timeline.lanes
        ],
        "findings": _findings_as_json(timeline),
        "marks": list(map(mark_as_dict, timeline.marks)),
        "keys": [key_as_json(key) for key in timeline.keys],
        "verdict": timeline.verdict,
        "not_compared": list(timeline.not_compared),
        "assumed": list(timeline.assumed),
        "notes": list(timeline.notes),
    }


def _findings_as_json(timeline: Timeline) -> list[dict[str, Any]]:
    found = findings_as_json(timeline.findings)
    for number, finding in enumerate(found):
        for rank, span in timeline.spans_of(number).items():
            finding["by_rank"][str(rank)] |= {"state": span.state, "seconds": span.seconds}
    return found


def key_as_json(key: Key) -> dict[str, Any]:
    by_rank = {
        str(rank): {**vars(cell), "not_finite": cell.not_finite} if cell.series else vars(cell)
        for rank, cell in sorted(key.cells.items())
    }
    ranks = {"missing_ranks": list(key.missing), "fewer_ranks": list(key.fewer)}
    return {"key": key.name, "place": key.place, **ranks, "by_rank": by_rank}
