"""The first operation of a step, over all ranks, whose inputs were finite and whose outputs were not.

1. Each rank's entries are read once (`nan_scan`): its candidates and its collectives.
2. Collectives of different ranks are matched by their group, their kind and their order in the group; a send with its
   receive. Walked in an order that fits all ranks, they give every rank a clock: what is after a collective is later
   than what is before it on any of its ranks.
3. A collective whose inputs were finite on all its ranks, and whose outputs were not, is a candidate itself.
4. The candidates with the earliest clock are the origins: before the first collective, or between two of them, of every
   rank its own first one. Of modules inside each other, and the calls in them, it is the innermost. What reached a
   gradient, a collective or the loss, on any rank, comes before what nothing used; that is mentioned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddpstats._base.text import ranks_text
from ddpstats.dump.analyze._candidates import Candidate, Kind, RankScan, bad_ones
from ddpstats.dump.analyze._growth import Grower, ancestors, overflowed
from ddpstats.dump.msprobe import CollectiveEntry

Phase = Literal["", "before the first collective", "between collectives", "in a collective"]
Key = tuple[str, tuple[int, ...], str, int, int]
"""Group, its ranks, what is called, and from and to whom (`_ALL` where everybody takes part)."""

_ALL, _UNKNOWN = -1, -2
_VAGUE = frozenset({"arrived", "gradient"})
_Find = tuple[tuple[int, int], "NaNOrigin", bool]  # clock, what, and whether something used it


@dataclass(frozen=True)
class NaNOrigin:
    """Where the first value that is not finite comes from, on one rank.

    Attributes:
        rank, name, kind: which entry of which rank, and how it is to blame.
        candidate: what is known of it.
        after, until: the collectives of this rank around it, by name; None at the beginning and at the end.
        modules: the modules' passes around it, innermost first.
        grower: what made the values grow until then, if something did repeatedly.
        op: of a collective that reduces.
        undumped: ranks of a collective whose dump is not there.
        recorded: see `RankScan`.
    """

    rank: int
    kind: Kind
    candidate: Candidate
    after: str | None
    until: str | None
    modules: tuple[str, ...]
    grower: Grower | None
    recorded: frozenset[tuple[str, str]] = frozenset()
    op: str = ""
    undumped: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.candidate.name


@dataclass(frozen=True)
class Findings:
    """What the dumps of a step say.

    Attributes:
        origins: ascending by rank; empty where every tensor is finite, or was made infinite on purpose.
        phase: when that was.
        unmatched: collectives that some ranks of their group have in their dump, and others not; that did not end; and
            messages that do not say with whom.
        also: (rank, candidate) of what was not finite either, and is not to blame: nothing used it, or it was a NaN
            that became finite again.
    """

    origins: tuple[NaNOrigin, ...]
    phase: Phase
    unmatched: tuple[str, ...]
    also: tuple[tuple[int, Candidate], ...] = field(default=())


@dataclass(eq=False)
class _Meeting:
    """One collective, on all ranks that have it."""

    key: Key
    number: int
    members: dict[int, CollectiveEntry]


def find_origins(scans: Sequence[RankScan]) -> Findings:
    """What the scans of all ranks of one step say together."""
    meetings = _matched(scans)
    clocks, order = _walked(scans, meetings)
    finds: list[_Find] = []
    for meeting in order:
        finds += [((clocks[id(meeting)], 0), origin, True) for origin in _of_collective(scans, meeting)]
    for scan in scans:
        finds += _of_rank(scan, [clocks[id(meeting)] for meeting in meetings[scan.rank]])
    if any(is_used for *_, is_used in finds):
        finds = [find for find in finds if find[2]]
    unmatched = _unmatched(scans, order)
    if not finds:
        return Findings((), "", unmatched, _also(scans, ()))
    first = min(clock for clock, *_ in finds)
    origins = sorted((origin for clock, origin, _ in finds if clock == first), key=lambda origin: origin.rank)
    # What nothing recorded made may have come from another rank, by a collective whose entry was written later.
    origins = [origin for origin in origins if origin.kind not in _VAGUE] or origins
    phase: Phase = "between collectives" if first[1] else "in a collective"
    if first == (0, 1):
        phase = "before the first collective"
    return Findings(tuple(origins), phase, unmatched, _also(scans, origins))


def _of_rank(scan: RankScan, clocks: Sequence[int]) -> list[_Find]:
    """Its first candidate that something used, and its first one that stands at all."""
    held = [one for one in scan.candidates if one.holds and one.kind != "collective"]
    used = [one for one in held if one.standing == "strong"]
    return [
        ((max(clocks[: one.position], default=0), 1), _origin(scan, one), one.standing == "strong")
        for one in (used or held)[:1]
    ]


def _also(scans: Sequence[RankScan], origins: Sequence[NaNOrigin]) -> tuple[tuple[int, Candidate], ...]:
    """What is not finite, is no consequence, and is not to blame."""
    blamed = [origin.candidate for origin in origins]
    return tuple(
        (scan.rank, one)
        for scan in scans
        for one in scan.candidates
        if one not in blamed and (one.standing in ("weak", "unused") or _is_mended(one))
    )


def _is_mended(candidate: Candidate) -> bool:
    made_nan = candidate.kind == "computation" and any(bad.leaf.has_nan for bad in candidate.bad)
    return made_nan and candidate.standing == "finite again"


# -- collectives of different ranks -----------------------------------------------------------------------------------


def _matched(scans: Sequence[RankScan]) -> dict[int, list[_Meeting]]:
    """Of every rank, its collectives in execution order, each as what all its ranks share.

    By their number in the group where all dumps say it, for an entry may be missing; or else counted.
    """
    found: dict[tuple[Key, int], _Meeting] = {}
    of_rank: dict[int, list[_Meeting]] = {}
    has_sequence = all(call.sequence is not None for scan in scans for call in scan.collectives)
    for scan in scans:
        counts: dict[Key, int] = {}
        numbered: dict[str, tuple[Key, int]] = {}
        for call in sorted(scan.collectives, key=lambda call: call.number):  # as begun, not as ended
            key = _key(scan.rank, call)
            counts[key] = counts.get(key, 0) + 1
            number = call.sequence if has_sequence and call.sequence is not None else counts[key] - 1
            numbered[call.name] = key, number
        of_rank[scan.rank] = []
        for call in scan.collectives:
            meeting = found.setdefault(numbered[call.name], _Meeting(*numbered[call.name], {}))
            meeting.members[scan.rank] = call
            of_rank[scan.rank].append(meeting)
    return of_rank


def _key(rank: int, call: CollectiveEntry) -> Key:
    if not call.is_message:
        return call.group, call.ranks, call.api, _ALL, _ALL
    if call.peer is None:
        return call.group, call.ranks, call.api, rank, _UNKNOWN
    source, destination = (rank, call.peer) if call.api.endswith("send") else (call.peer, rank)
    return call.group, call.ranks, "message", source, destination


def _walked(scans: Sequence[RankScan], of_rank: dict[int, list[_Meeting]]) -> tuple[dict[int, int], list[_Meeting]]:
    """The clock of every meeting, by its id, and the meetings in an order that fits all ranks, where there is one."""
    queues = {scan.rank: deque(of_rank[scan.rank]) for scan in scans}
    now = dict.fromkeys(queues, 0)
    clocks: dict[int, int] = {}
    order: list[_Meeting] = []
    while heads := [queue[0] for queue in queues.values() if queue]:
        ready = (meeting for meeting in heads if all(queues[rank][0] is meeting for rank in meeting.members))
        meeting = next(ready, heads[0])  # asynchronous ones may cross: then some order is as good as another
        clocks[id(meeting)] = 1 + max(now[rank] for rank in meeting.members)
        order.append(meeting)
        for rank in meeting.members:
            now[rank] = clocks[id(meeting)]
            queues[rank].remove(meeting)
    return clocks, order


def _unmatched(scans: Sequence[RankScan], order: Sequence[_Meeting]) -> tuple[str, ...]:
    dumped = {scan.rank for scan in scans}
    lines = []
    for meeting in order:
        rank, call = next(iter(meeting.members.items()))
        if call.is_message and call.peer is None:
            lines.append(f"{call.name} of rank {rank} does not say with whom: what it received is not followed back")
            continue
        expected = set(meeting.key[3:]) if call.is_message else set(meeting.key[1])
        if missing := sorted((expected & dumped) - set(meeting.members)):
            lines.append(f"{call.name} of rank {rank} has no counterpart in the dump of {ranks_text(missing)}")
        for member, one in meeting.members.items():
            if one.incomplete:
                lines.append(f"{one.name} of rank {member} had not ended when the dump did, or it failed")
    return tuple(lines)


def _of_collective(scans: Sequence[RankScan], meeting: _Meeting) -> list[NaNOrigin]:
    """The collective itself, where finite inputs of all ranks became something else. It is one origin per rank."""
    calls = meeting.members
    if any(call.bad_inputs for call in calls.values()):
        return []
    dumped = {scan.rank for scan in scans}
    ranks = set(meeting.key[3:]) if meeting.key[2] == "message" else set(meeting.key[1])
    undumped = tuple(sorted(ranks - dumped))
    found = []
    for scan in scans:
        call = calls.get(scan.rank)
        if call is None or not call.bad_outputs:
            continue
        known = next((one for one in scan.candidates if one.kind == "collective" and one.name == call.name), None)
        place = next(index for index, one in enumerate(scan.collectives) if one is call)
        candidate = known or Candidate("collective", call.entry, tuple(bad_ones(call.made)), place, 0)
        found.append(_origin(scan, candidate, call.op, undumped))
    return found


# -- one rank ---------------------------------------------------------------------------------------------------------


def _origin(scan: RankScan, candidate: Candidate, op: str = "", undumped: tuple[int, ...] = ()) -> NaNOrigin:
    chosen = _innermost(scan, candidate) if candidate.kind == "computation" else candidate
    after = scan.collectives[chosen.position - 1].name if chosen.position else None
    at = chosen.position + (chosen.kind == "collective")
    until = scan.collectives[at].name if at < len(scan.collectives) else None
    modules = tuple(ancestors(chosen.name, scan.dump))
    grower = None
    if chosen.kind != "given":
        grower = scan.growth.grower("backward" if chosen.in_backward else "forward", scan.dump)
    if grower is not None and not overflowed(chosen.entry, [one.leaf for one in chosen.bad], grower):
        grower = None
    recorded = frozenset(scan.recorded)
    return NaNOrigin(scan.rank, chosen.kind, chosen, after, until, modules, grower, recorded, op, undumped)


def _innermost(scan: RankScan, candidate: Candidate) -> Candidate:
    """Where a module's entry comes before those of what is inside it: the first of those that stand."""
    for other in scan.candidates:
        inside = other.order > candidate.order and other.kind == "computation" and other.holds
        if inside and candidate.name in ancestors(other.name, scan.dump):
            return _innermost(scan, other)
    return candidate
