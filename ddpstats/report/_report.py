"""``ddpstats report DIR``: where the ranks parted, from what they recorded: as text, JSON, a page, a trace.

Exit status 0 if all ranks did the same and nothing was marked, 1 if something was found or not all could be compared, 2
if it cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats._base.report import VerbReport, check_writable, write_file
from ddpstats._base.wording import count_of
from ddpstats.guard._report import findings_as_json
from ddpstats.report._page import page_of
from ddpstats.report._perfetto import trace_of
from ddpstats.report._sources import read_timeline
from ddpstats.report._timeline import Key, Timeline

_SHOWN_KEYS, _SHOWN_MARKS, _SHOWN_COUNTS = 16, 16, 8


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
    notes = [f"note: {note}" for note in timeline.notes]
    return "\n".join([*lines, *_marks(timeline), *_keys(timeline), *notes])


def _collectives(timeline: Timeline) -> list[str]:
    lines = [f"{len(timeline.lanes)} of {timeline.world_size} ranks left a record:"]
    for lane in timeline.lanes:
        cut = "" if lane.complete else " (the newest; older ones were dropped)"
        lines.append(f"  rank {lane.rank}: {len(lane.calls)} collectives{cut}")
    lines += ["", *("\n" + finding.message for finding in timeline.findings)]
    lines += [timeline.verdict] if timeline.verdict else []
    return [*lines, *(f"not compared: {one}" for one in timeline.not_compared), *timeline.assumed]


def _marks(timeline: Timeline) -> Iterator[str]:
    for mark in timeline.marks[:_SHOWN_MARKS]:
        where = "" if mark.step is None else f", step {mark.step}"
        who = f" on {ranks_text(mark.ranks)}" if mark.ranks else ""
        yield f"\n{_clock(mark.time)}  {mark.kind}{who}{where}:"
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
    """UTC, for ranks of several hosts."""
    return datetime.fromtimestamp(min(seconds, 2e11), timezone.utc).strftime("%H:%M:%S.%f")[:-3]


def as_json(timeline: Timeline) -> dict[str, Any]:
    """All but the single events, which ``--perfetto`` has."""
    return {
        "world_size": timeline.world_size,
        "ranks": [
            {"rank": lane.rank, "collectives": len(lane.calls), "complete": lane.complete} for lane in timeline.lanes
        ],
        "findings": findings_as_json(timeline.findings),
        "marks": [mark.as_dict() for mark in timeline.marks],
        "keys": [key_as_json(key) for key in timeline.keys],
        "verdict": timeline.verdict,
        "not_compared": list(timeline.not_compared),
        "assumed": list(timeline.assumed),
        "notes": list(timeline.notes),
    }


def key_as_json(key: Key) -> dict[str, Any]:
    by_rank = {str(rank): vars(cell) for rank, cell in sorted(key.cells.items())}
    return {"key": key.name, "place": key.place, "missing_ranks": list(key.missing), "by_rank": by_rank}
