"""``ddpstats report DIR``: match the records of all ranks, and say what the guard would have said.

Reads what ``collective_guard(record_dir=...)`` wrote, also when the processes were killed in the middle. Exit status 0
if all ranks did the same, 1 if something was found, 2 if the records cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpstats._base.report import VerbReport
from ddpstats.errors import DdpstatsError
from ddpstats.guard._diagnosis import find
from ddpstats.guard._events import newest_in_a_row
from ddpstats.guard._p2p import match_records
from ddpstats.guard._records import RankRecord, read_records
from ddpstats.guard._status import DOUBT, LEFT, NOTHING, GuardFinding, RankStatus

_HOW_TO_RECORD = (
    "Records are written by: torchrun ... -m ddpstats run --guard record --record-dir DIR train.py; give that DIR."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="where the ranks wrote their records")


def run(args: argparse.Namespace) -> int:
    """Raises `DdpstatsError` for a directory that holds no records, or damaged ones."""
    try:
        records = read_records(args.directory)
    except (OSError, ValueError) as error:
        hint = "" if any(Path(args.directory).glob("rank*.jsonl")) else f". {_HOW_TO_RECORD}"
        raise DdpstatsError(f"{error}{hint}") from None
    findings = diagnose(records)
    status = 1 if any(finding.kind != DOUBT for finding in findings) else 0  # a doubt is told, as the guard warns of it
    return VerbReport(status, lambda: as_text(records, findings), lambda: as_json(records, findings)).show(args.json)


def diagnose(records: Sequence[RankRecord]) -> list[GuardFinding]:
    """What went wrong first, per group; the group in which it happened first comes first."""
    groups: dict[str, Mapping[str, Any]] = {}
    for record in records:
        groups.update(record.groups)
    found = [finding for name in groups if (finding := _in_group(name, groups[name], records)) is not None]
    message = match_records({record.rank: record.events for record in records})
    found += [message] if message is not None else []
    return sorted(found, key=lambda finding: min((e.started for e in finding.by_rank.values()), default=0.0))


def _in_group(name: str, described: Mapping[str, Any], records: Sequence[RankRecord]) -> GuardFinding | None:
    by_rank = {record.rank: record for record in records}
    statuses = [_status_of(rank, name, by_rank.get(rank)) for rank in described["ranks"]]
    found = find(name, described["words"], statuses)
    return None if found is not None and found.kind == NOTHING else found


def _status_of(rank: int, group: str, record: RankRecord | None) -> RankStatus:
    if record is None:
        return RankStatus(rank, last=None, left="wrote no record")
    events = record.events_by_group.get(group, [])
    left = None
    if record.end is not None:
        left = LEFT if record.end.get("end") == "left" else f"{LEFT} by {record.end.get('end')}"
    last = record.events[-1] if record.events else None
    return RankStatus(
        rank,
        newest_in_a_row(events),
        {event.seq: event.balance for event in events if event.balance},
        events[-1].seq if events else 0,
        None,
        None if last is None else last.in_full(),
        left if left is not None else "its record ends here (the process was killed, or hangs)",
    )


def as_text(records: Sequence[RankRecord], findings: Sequence[GuardFinding]) -> str:
    lines = [f"{len(records)} of {records[0].world_size} ranks left a record:"]
    for record in records:
        cut = "" if record.complete else " (the newest; older ones were dropped)"
        lines.append(f"  rank {record.rank}: {len(record.events)} collectives{cut}")
    lines += ["", *("\n" + finding.message for finding in findings)]
    if not findings:
        lines.append("All ranks issued the same collectives in the same order.")
    return "\n".join(lines)


def as_json(records: Sequence[RankRecord], findings: Sequence[GuardFinding]) -> dict[str, Any]:
    return {
        "world_size": records[0].world_size,
        "ranks": [{"rank": r.rank, "collectives": len(r.events), "complete": r.complete} for r in records],
        "findings": [
            {
                "kind": finding.kind,
                "group": finding.group,
                "seq": finding.seq,
                "missing_ranks": list(finding.missing),
                "culprit_ranks": list(finding.culprits),
                "by_rank": {str(rank): event.as_dict() for rank, event in finding.by_rank.items()},
                "message": finding.message,
            }
            for finding in findings
        ],
    }
