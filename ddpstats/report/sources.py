"""Everything in some directories that a report can be made of: records, Flight Recorder dumps, bundles, stats dumps.

Whatever is there is used; what is in the way of one part is told and leaves out that part. A damaged record is an
error: a report without a rank would say that this rank is missing. One that had only just begun is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ddpstats._base.marks import Mark
from ddpstats._base.text import printable
from ddpstats.capture.manifest import BUNDLE_NAME, read_manifest
from ddpstats.dump.analyze.nan_origin import examine
from ddpstats.dump.reader import find_ranks, rank_of, steps_in
from ddpstats.errors import DdpstatsError
from ddpstats.guard.record import NoRecord, RankRecord, diagnose, read_records
from ddpstats.report.flight_recorder import FlightDump, joined, read_dumps
from ddpstats.report.timeline import Span, Timeline, timeline_of

_HOW_TO_RECORD = (
    "Records are written by: torchrun ... -m ddpstats run --guard record --record-dir DIR train.py; give that DIR. "
    "A program that makes no process group leaves none."
)


def read_timeline(directories: Sequence[Path]) -> Timeline:
    """Raises `DdpstatsError` where there is nothing, or a record is damaged."""
    notes: list[str] = []
    directories = _distinct(directories)
    records = _records(directories, notes)
    try:
        flights = _flights(directories)
    except DdpstatsError as error:
        if not records:
            raise
        flights = []  # many a program has a file called metrics_rank_0.json
        notes.append(f"Flight Recorder dumps are left out: {error}")
    marks = [mark for directory in directories for mark in (*_bundles(directory, notes), *_dumps(directory, notes))]
    if not records and not flights and not marks:
        none_here = (
            f"{', '.join(map(str, directories))} holds no rank*.jsonl, so no record of ddpstats. {_HOW_TO_RECORD}"
        )
        raise DdpstatsError(printable(notes) or none_here)
    if records:
        spans = _joined(records, flights, notes)
    else:
        records = [dump.record for dump in flights]
        spans = {dump.record.rank: dict(enumerate(dump.spans)) for dump in flights}
        notes += ["read from Flight Recorder dumps: without labels, reduce ops, roots and tags"] * bool(flights)
    return timeline_of(records, diagnose(records), marks, spans, notes)


def _joined(
    records: Sequence[RankRecord], flights: Sequence[FlightDump], notes: list[str]
) -> dict[int, Mapping[int, Span]]:
    """Rank -> place among its events -> what the Flight Recorder adds."""
    by_rank = {record.rank: record for record in records}
    spans = {rank: joined(by_rank[rank], dump) for dump in flights if (rank := dump.record.rank) in by_rank}
    alone = [dump.record.rank for dump in flights if dump.record.rank not in by_rank]
    notes += [f"rank {rank}: its Flight Recorder dump is not used, for it has no record beside it" for rank in alone]
    if flights:
        of = sum(len(dump.spans) for dump in flights)
        notes.append(f"{sum(map(len, spans.values())):,} events are joined with the Flight Recorder's, of {of:,}")
    return dict(spans)


def _distinct(directories: Iterable[Path]) -> list[Path]:
    """Each once, however often it was given."""
    for directory in directories:
        if not directory.exists():
            raise DdpstatsError(f"{directory}: there is no such directory. {_HOW_TO_RECORD}")
        if not directory.is_dir():
            raise DdpstatsError(f"{directory} is a file: give the directory that it is in. {_HOW_TO_RECORD}")
    return list({directory.resolve(): directory for directory in directories}.values())


def _records(directories: Sequence[Path], notes: list[str]) -> list[RankRecord]:
    """Of all directories together: each host may have written to its own."""
    try:
        return read_records(*directories, notes=notes)
    except NoRecord:
        return []
    except (OSError, ValueError) as error:
        raise DdpstatsError(str(error)) from None


def _flights(directories: Iterable[Path]) -> list[FlightDump]:
    try:
        return read_dumps(directories)
    except (OSError, ValueError) as error:
        raise DdpstatsError(str(error)) from None


def _bundles(directory: Path, notes: list[str]) -> Iterator[Mark]:
    """What `NaNCapture` wrote."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if BUNDLE_NAME.fullmatch(path.name) is None or not path.is_dir() or path.is_symlink():
            continue
        try:
            manifest = read_manifest(path)
            when = datetime.fromisoformat(manifest.created_utc).replace(tzinfo=timezone.utc).timestamp()
        except (DdpstatsError, OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {error}")
            continue
        yield Mark(manifest.reason, manifest.message, when, manifest.step, manifest.culprit_ranks)


def _dumps(directory: Path, notes: list[str]) -> Iterator[Mark]:
    """Where the first NaN of each dumped step came from, as ``ddpstats nan-origin`` says it."""
    for step, path in steps_in(directory).items():
        try:
            dumps = {dump.rank: dump for dump in find_ranks(path)}
            origins = examine([*dumps.values()]).origins
        except (DdpstatsError, OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {error}")
            continue
        for origin in origins:
            dump = dumps[origin.rank]
            when = dump.path.stat().st_mtime  # entries have no time: when the step's file was written
            yield Mark("dump", origin.verdict, when, step, (rank_of(dump),))
