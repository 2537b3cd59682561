"""``ddpstats report DIR`` shows where the ranks diverged, from what they recorded: as text, JSON, a page, a trace.

Records, Flight Recorder dumps, bundles and stats dumps are read from all directories together: each host may have
written to its own. A damaged record is an error: a report without a rank would say that this rank is missing. Any other
file that cannot be used is named in a note.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ddpstats._base.marks import Mark
from ddpstats._base.text import check_writable, print_report, printable, write_file
from ddpstats.capture.manifest import bundles_in, read_manifest
from ddpstats.dump.analyze import find_ranks, rank_of
from ddpstats.dump.analyze.nan_origin import examine
from ddpstats.dump.msprobe import steps_in
from ddpstats.errors import DdpstatsError
from ddpstats.guard.record import NoRecord, RankRecord, read_records
from ddpstats.report.flight_recorder import Spans, join, read_dumps
from ddpstats.report.formats import as_text, page_of, trace_of
from ddpstats.report.timeline import Recorded, report_of

_HOW_TO_RECORD = (
    "Records are written by: torchrun ... -m ddpstats run --guard record --record-dir DIR train.py; give that DIR. "
    "A program that makes no process group leaves none."
)

EPILOG = """examples:
  ddpstats run --nproc 2 --guard record --record-dir records train.py; ddpstats report records
  ddpstats report records captures --html report.html     with what NaN capture wrote, as a page
  ddpstats report records --perfetto trace.json           for ui.perfetto.dev"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    wrote = "where the ranks wrote: records, Flight Recorder dumps, bundles of NaN capture, stats dumps"
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help=wrote)
    parser.add_argument("--html", metavar="FILE", type=Path, help="also a page to look at, which needs no network")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="also a trace for ui.perfetto.dev (JSON)")


def run(args: argparse.Namespace) -> int:
    """Raises `DdpstatsError` for a directory that holds nothing to report of, or damaged records."""
    check_writable(args.html, args.perfetto)
    try:
        recorded = read_directories(args.directories)
    except (OSError, ValueError) as error:
        raise DdpstatsError(str(error)) from None
    report = report_of(recorded)
    if args.html is not None:
        write_file(args.html, lambda file: file.write(page_of(recorded, report)))
    if args.perfetto is not None:
        write_file(args.perfetto, lambda file: file.writelines(trace_of(recorded, report)))
    return print_report(int(report["has_findings"]), args.json, lambda: as_text(report), lambda: report)


def read_directories(directories: Sequence[Path]) -> Recorded:
    """Raises `DdpstatsError` where there is nothing; ValueError or OSError where a record is damaged."""
    for directory in directories:
        if not directory.is_dir():
            raise DdpstatsError(f"{directory} is no directory. {_HOW_TO_RECORD}")
    directories = list({directory.resolve(): directory for directory in directories}.values())
    notes: list[str] = []
    records: list[RankRecord] = []
    with contextlib.suppress(NoRecord):
        records = read_records(*directories, notes=notes)
    dumps: dict[int, tuple[RankRecord, Spans]] = {}
    try:
        dumps = read_dumps(directories)
    except (OSError, ValueError) as error:
        if not records:
            raise
        notes.append(f"Flight Recorder dumps are left out: {error}")  # any program may have a file metrics_rank_0.json
    marks = [mark for directory in directories for mark in _marks(directory, notes)]
    if not records and not dumps and not marks:
        nothing = f"{', '.join(map(str, directories))} holds no rank*.jsonl, so no record of ddpstats. {_HOW_TO_RECORD}"
        if notes or not any(map(steps_in, directories)):
            raise DdpstatsError(printable(notes) or nothing)
        notes.append("in the stats dumps no NaN or infinity was found")
    if dumps and not records:
        notes.append("read from Flight Recorder dumps: without labels, reduce ops, roots and tags")
        records = [record for record, _ in dumps.values()]
    spans = {record.rank: join(record, dumps[record.rank][1]) for record in records if record.rank in dumps}
    return Recorded(records, spans, marks, notes)


def _marks(directory: Path, notes: list[str]) -> Iterator[Mark]:
    """Yield what bundles of NaN capture say, and where the first NaN of each dumped step came from."""
    sources = [(path, _mark_of_bundle) for path, _ in bundles_in(directory)]
    sources += [(path, _marks_of_step) for path in steps_in(directory).values()]
    for path, read in sources:
        try:
            yield from read(path)
        except (DdpstatsError, OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {error}")


def _mark_of_bundle(path: Path) -> list[Mark]:
    manifest = read_manifest(path)
    when = datetime.fromisoformat(manifest.created_utc).replace(tzinfo=timezone.utc).timestamp()
    return [Mark(manifest.reason, manifest.message, when, manifest.step, manifest.culprit_ranks)]


def _marks_of_step(path: Path) -> list[Mark]:
    dumps = {dump.rank: dump for dump in find_ranks(path)}
    verdicts = [(dumps[origin.rank], origin.verdict) for origin in examine([*dumps.values()]).origins]
    # entries have no time: when the step's file was written
    return [Mark("dump", text, dump.path.stat().st_mtime, dump.step, (rank_of(dump),)) for dump, text in verdicts]
