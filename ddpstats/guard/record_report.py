"""The records of all ranks, matched: what the guard would have said, in words and as JSON.

They are what ``collective_guard(record_dir=...)`` wrote, also when the processes were killed in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpstats._base.text import count_of, ranks_text
from ddpstats.guard.diagnosis import (
    LEFT,
    NOTHING,
    GuardFinding,
    Pair,
    RankStatus,
    find,
    message_mismatch,
    pair_messages,
    unmatched,
)
from ddpstats.guard.event import MESSAGES, Event, newest_in_a_row
from ddpstats.guard.record import RankRecord


def diagnose(records: Sequence[RankRecord]) -> list[GuardFinding]:
    """Return what went wrong first in each group, by time."""
    groups = {**_undescribed(records), **_described(records)}
    findings = [finding for name in groups if (finding := _in_group(name, groups[name], records)) is not None]
    message = message_mismatch(_messages_of(records)) or _not_through(records)
    findings += [message] if message is not None else []
    return sorted(findings, key=lambda finding: min((e.started for e in finding.by_rank.values()), default=0.0))


def not_compared(records: Sequence[RankRecord]) -> list[str]:
    """Return a sentence for each thing that ranks may have done differently without `diagnose` finding it."""
    known = {record.rank for record in records}
    asked = {rank for given in _described(records).values() for rank in given["ranks"]}
    absent = max((record.world_size for record in records), default=0) - len(known | asked)
    cut = [record.rank for record in records if not record.complete and record.messages]
    return [
        *(
            f"{given['words']}: no record says which ranks belong to it, and only {ranks_text(given['ranks'])} used it"
            for given in _undescribed(records).values()
            if len(given["ranks"]) == 1
        ),
        *([f"{count_of(absent, 'ranks')} without a record, of which no group is known"] if absent > 0 else []),
        *([f"messages of {ranks_text(cut)}: older ones were dropped, so they cannot be counted"] if cut else []),
    ]


def assumed(records: Sequence[RankRecord]) -> list[str]:
    """Return a sentence for each thing that `diagnose` assumed where it found nothing."""
    alone = [
        f"{ranks_text([rank.rank])}: {rank.events[index]}{rank.events[index].at}: {ranks_text([peer.rank])} "
        "recorded nothing that goes with it"
        for rank, index, peer in _unpaired(records)
        if not _may_wait(rank, index, peer)
    ]
    return alone + [
        f"{given['words']}: no record says which ranks belong to it; {ranks_text(given['ranks'])}, which used it, were "
        "compared"
        for given in _undescribed(records).values()
        if len(given["ranks"]) > 1
    ]


def _not_through(records: Sequence[RankRecord]) -> GuardFinding | None:
    """Return the first message that only one rank recorded, and may have waited for; receives come before sends."""
    alone = [
        (rank, rank.events[index], peer) for rank, index, peer in _unpaired(records) if _may_wait(rank, index, peer)
    ]
    if not alone:
        return None
    rank, event, peer = min(alone, key=lambda entry: (entry[1].signature.op == "send", entry[1].started))
    group = event.group.removesuffix(MESSAGES)
    words = _described(records).get(group, {}).get("words", f"group {group!r}")
    return unmatched(event, rank.rank, words, _status_of(peer.rank, event.group, peer))


def message_pairs(records: Sequence[RankRecord]) -> list[Pair]:
    """Return the two sides of each message that both ranks recorded, by their index among a rank's events."""
    messages = {record.rank: record.messages for record in records}
    pairs = pair_messages(_messages_of(records))[0]
    return [(a, messages[a][sent][0], b, messages[b][received][0]) for a, sent, b, received in pairs]


def _messages_of(records: Sequence[RankRecord]) -> dict[int, list[Event]]:
    return {record.rank: [event for _, event in record.messages] for record in records}


def _unpaired(records: Sequence[RankRecord]) -> Iterator[tuple[RankRecord, int, RankRecord]]:
    """Yield (rank, which of its events, the other rank) of the first message of each stream that the other lacks.

    Not where either has dropped older lines, nor where the receiver takes some from any rank: no number is known there.
    """
    by_rank, streams = {record.rank: record for record in records if record.complete}, set()
    from_any = {
        (rank, event.group, event.tag)
        for rank, record in by_rank.items()
        for _, event in record.messages
        if event.peer is None
    }
    for rank, number in pair_messages(_messages_of(records))[1]:
        index, event = by_rank[rank].messages[number]
        receiver = event.peer if event.signature.op == "send" else rank
        stream = rank, event.signature.op, event.peer, event.group, event.tag
        if event.peer in by_rank and (receiver, event.group, event.tag) not in from_any and stream not in streams:
            streams.add(stream)
            yield by_rank[rank], index, by_rank[event.peer]


def _may_wait(rank: RankRecord, index: int, peer: RankRecord) -> bool:
    """Return whether ``rank`` may wait for ``peer`` there: no collective came after it, and a record breaks off.

    Otherwise the message came through, its other half outside of a guard, or the rank did not wait for it.
    """
    ended_well = _ended_well(rank) and _ended_well(peer)
    return bool(rank.run) and not ended_well and all(event.is_message for event in rank.events[index:])


def _ended_well(record: RankRecord) -> bool:
    return record.end is not None and record.end.get("end") == "left"


def _described(records: Sequence[RankRecord]) -> dict[str, Mapping[str, Any]]:
    return {name: given for record in records for name, given in record.groups.items()}


def _undescribed(records: Sequence[RankRecord]) -> dict[str, Mapping[str, Any]]:
    """Return the ranks that used each group that no record describes (any more)."""
    described, ranks_of = _described(records), dict[str, list[int]]()
    for record in records:
        for name, events in record.events_by_group.items():
            if name not in described and not all(event.is_message for event in events):
                ranks_of.setdefault(name, []).append(record.rank)
    return {name: {"words": f"group {name!r}", "ranks": ranks} for name, ranks in ranks_of.items()}


def _in_group(name: str, described: Mapping[str, Any], records: Sequence[RankRecord]) -> GuardFinding | None:
    by_rank = {record.rank: record for record in records}
    statuses = [
        _status_of(rank, name, record)
        for rank in described["ranks"]
        if (record := by_rank.get(rank)) is None or record.complete or name in record.events_by_group
    ]  # what the others did there was dropped
    finding = find(name, described["words"], statuses) if statuses else None
    return None if finding is not None and finding.kind == NOTHING else finding


def _status_of(rank: int, group: str, record: RankRecord | None) -> RankStatus:
    if record is None:
        return RankStatus(rank, last=None, left="wrote no record")
    events = record.events_by_group.get(group, [])
    left = None
    if record.end is not None:
        left = LEFT if _ended_well(record) else f"{LEFT} by {record.end.get('end')}"
    last = record.events[-1] if record.events else None
    return RankStatus(
        rank,
        newest_in_a_row(events),
        events[-1].seq if events else 0,
        None,
        None if last is None else last.in_full(),
        left if left is not None else "its record ends here (the process was killed, or hangs)",
        messages=[event for _, event in record.messages],
    )


def as_text(records: Sequence[RankRecord], findings: Sequence[GuardFinding]) -> str:
    lines = [f"{len(records)} of {records[0].world_size} ranks left a record:"]
    for record in records:
        cut = "" if record.complete else " (the newest; older ones were dropped)"
        lines.append(f"  rank {record.rank}: {len(record.events)} collectives{cut}")
    lines += ["", *("\n" + finding.message for finding in findings)]
    return "\n".join(lines)


def as_json(records: Sequence[RankRecord], findings: Sequence[GuardFinding]) -> dict[str, Any]:
    return {
        "world_size": records[0].world_size,
        "ranks": [{"rank": r.rank, "collectives": len(r.events), "complete": r.complete} for r in records],
        "findings": findings_as_json(findings),
    }


def findings_as_json(findings: Sequence[GuardFinding]) -> list[dict[str, Any]]:
    return [
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
    ]
