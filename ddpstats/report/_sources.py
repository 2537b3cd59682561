"""Everything in some directories that a report can be made of: records, Flight Recorder dumps, bundles, stats dumps.

Whatever is there is used; what is in the way of one part is told and leaves out that part, but a damaged record is an
error: a report without a rank would say that this rank is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ddpstats._base.marks import Mark
from ddpstats.capture._manifest import BUNDLE_NAME, read_manifest
from ddpstats.dump.format._files import find_ranks, rank_of, steps_in
from ddpstats.dump.origin._explain import verdict
from ddpstats.dump.origin._first_nan import find_origins
from ddpstats.dump.origin._rank_scan import scan_rank
from ddpstats.errors import DdpstatsError
from ddpstats.guard._records import RankRecord, read_records
from ddpstats.guard._report import diagnose
from ddpstats.report._flight_recorder import FlightDump, joined, read_dumps
from ddpstats.report._timeline import Timeline, timeline_of

_HOW_TO_RECORD = (
    "Records are written by: torchrun ... -m ddpstats run --guard record --record-dir DIR train.py; give that DIR."
)


def read_timeline(directories: Sequence[Path]) -> Timeline:
    """Raises `DdpstatsError` where there is nothing, or a record is damaged."""
    notes: list[str] = []
    records = _records(directories)
    try:
        flights = _flights(directories)
    except DdpstatsError as error:
        if not records:
            raise
        flights = []  # many a program has a file called metrics_rank_0.json
        notes.append(f"Flight Recorder dumps are left out: {error}")
    marks = [mark for directory in directories for mark in (*_bundles(directory, notes), *_dumps(directory, notes))]
    if not records and not flights and not marks:
        raise DdpstatsError(f"{_none_here(directories)}, so no record of ddpstats. {_HOW_TO_RECORD}")
    spans = {}
    if records and flights:
        by_rank = {record.rank: record for record in records}
        spans = {rank: joined(by_rank[rank], dump) for dump in flights if (rank := dump.record.rank) in by_rank}
        alone = [dump.record.rank for dump in flights if dump.record.rank not in by_rank]
        notes += [
            f"rank {rank}: its Flight Recorder dump is not used, for it has no record beside it" for rank in alone
        ]
        added = sum(map(len, spans.values()))
        notes.append(
            f"{added:,} events are joined with the Flight Recorder's, of {sum(len(d.spans) for d in flights):,}"
        )
    elif flights:
        records = [dump.record for dump in flights]
        spans = {dump.record.rank: dict(enumerate(dump.spans)) for dump in flights}
        notes.append("read from Flight Recorder dumps: without labels, reduce ops, roots and tags")
    return timeline_of(records, diagnose(records) if records else [], marks, spans, notes)


def _none_here(directories: Sequence[Path]) -> str:
    return f"{', '.join(map(str, directories))} holds no rank*.jsonl"


def _records(directories: Iterable[Path]) -> list[RankRecord]:
    """Of the one directory that has some."""
    found: list[RankRecord] = []
    for directory in directories:
        if not any(directory.glob("rank*.jsonl")):
            continue
        if found:
            raise DdpstatsError(f"{directory} holds records too: give one directory with records at a time")
        try:
            found = read_records(directory)
        except (OSError, ValueError) as error:
            raise DdpstatsError(str(error)) from None
    return found


def _flights(directories: Iterable[Path]) -> list[FlightDump]:
    try:
        return [dump for directory in directories for dump in read_dumps(directory)]
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
            scans = [scan_rank(dump) for dump in find_ranks(path)]
            origins = find_origins(scans).origins
        except (DdpstatsError, OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {error}")
            continue
        dump_of = {scan.rank: scan.dump for scan in scans}
        for origin in origins:
            dump = dump_of[origin.rank]
            when = dump.path.stat().st_mtime  # entries have no time: when the step's file was written
            yield Mark("dump", verdict(origin, dump), when, step, (rank_of(dump),))
