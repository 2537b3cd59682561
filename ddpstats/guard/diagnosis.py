"""From what each rank says it did to a verdict in words: who differs, where, since when, and why, as far as that shows.

Pure: the same statuses give the same text on every rank, online and from records on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ddpstats._base.text import ranks_text
from ddpstats.guard.event import BY_TORCH, MASK, Event, Signature, same_labels
from ddpstats.guard.labels.judge import Judgement, judge
from ddpstats.guard.status import DOUBT, LEFT, MISMATCH, MISSING, NOTHING, GuardFinding, RankStatus

_SHOWN_GROUPS = 8

_BY_DIFFERENCE = {
    "the operation": "Make all ranks issue the same collectives in the same order.",
    "the reduce op": "Pass the same op= on all ranks.",
    "the root": "Pass the same src= or dst=, a global rank, on all ranks.",
    "the number of tensors": "Pass as many tensors on all ranks: where a rank lacks one, zeros in its place.",
    "the dtype": "Convert to one dtype on all ranks before the call.",
    "the number of dimensions": "Pass tensors of one shape on all ranks: reshape before the call.",
    "the shape": "Pass tensors of one shape on all ranks: pad them to the largest.",
    "the memory format": "Call .contiguous() on the tensor before the call, on all ranks.",
    "the label": (
        "Make all ranks go through the same keys in the same order (sort them, and reduce zeros for a key that a rank "
        "lacks), or use ddpstats.reduce_stats; where the difference is meant, put the calls into `with "
        "ddpstats.label('...')` of one name on all ranks."
    ),
    "the pieces": "Make what each rank sends to another what that one expects: split sizes, shapes and dtypes.",
}
_PARTS: tuple[tuple[str, Callable[[Signature], object]], ...] = (
    ("the operation", lambda signature: signature.op),
    ("the reduce op", lambda signature: signature.reduce_op),
    ("the root", lambda signature: signature.root),
    ("the number of tensors", lambda signature: len(signature.shapes)),
    ("the dtype", lambda signature: signature.dtypes),
    ("the number of dimensions", lambda signature: tuple(map(len, signature.shapes))),
    ("the shape", lambda signature: signature.shapes),
    ("the memory format: elements of equal shape lie in different order", lambda signature: signature.strides),
)
_BY_HAND = (
    "ddpstats.label() gave these names: give the same one on all ranks where they reduce the same thing. Where they do "
    "not, make all ranks go through the same keys in the same order, or use ddpstats.reduce_stats, which aligns them."
)
_ORDER = "Make all ranks issue the same collectives in the same order."


def find(
    group: str,
    words: str,
    statuses: Sequence[RankStatus],
    until: int | None = None,
    were_absent: Sequence[int] = (),
    in_doubt: bool = False,
) -> GuardFinding | None:
    """The first thing that went wrong in ``group`` (``words`` describe it), or None if all ranks agree.

    ``until``: a number that every rank should have reached, and in which some rank has waited for too long, or cannot
    be joined by all any more. Missing are the ranks that died or left before it by an error; else those that are behind
    it; else those that ran no Python for long; else those that are behind any other; else those that do not wait
    themselves. If all have come meanwhile, it is those that ``were_absent`` then. ``in_doubt``: labels differ, and that
    alone raised the question: without ``until`` no rank has waited in vain, and none is missing.
    """
    by_rank = {status.rank: status for status in statuses}
    is_end = until is not None and all(status.count < until for status in statuses)  # nobody began such a collective
    end = until if is_end else None
    seq, judged = first_difference(statuses)
    if seq is not None:
        return _mismatch(group, words, by_rank, seq)
    if in_doubt and until is None:
        return _doubt(group, words, by_rank, judged) if judged else None
    if until is not None:
        asleep = [rank for rank, status in by_rank.items() if status.slept_sec]
        named = _lost(by_rank, until, end) or _behind(by_rank, end, until) or asleep
        if named:
            came_to = [by_rank[rank].count for rank in named if not by_rank[rank].is_silent]
            return _missing(group, words, by_rank, min([until, *(count + 1 for count in came_to)]), named)
    behind = _behind(by_rank, end, max(status.count for status in statuses))
    if behind:
        return _missing(group, words, by_rank, min(by_rank[rank].count for rank in behind) + 1, behind)
    absent = [rank for rank, status in by_rank.items() if status.waits_in is None]
    if until is not None and 0 < len(absent) < len(by_rank):
        gone = [rank for rank in absent if by_rank[rank].dead or by_rank[rank].left not in (None, LEFT)]
        return _missing(group, words, by_rank, until, gone or absent)
    late = [rank for rank in were_absent if rank in by_rank]
    if until is not None and late:
        return _missing(group, words, by_rank, until, late)
    return _doubt(group, words, by_rank, judged) if judged else None


def _lost(by_rank: Mapping[int, RankStatus], until: int, end: int | None) -> list[int]:
    """Ranks for which no other one should have waited: others that are behind may only not have come yet.

    A rank that left because it missed another one is not at fault itself.
    """
    behind = _behind(by_rank, end, until)
    left = [rank for rank in behind if by_rank[rank].left not in (None, LEFT)]
    lost = [rank for rank, status in by_rank.items() if rank in left or (status.dead and status.left is None)]
    first = [rank for rank in lost if not by_rank[rank].missed]
    missed = {one for rank in lost for one in by_rank[rank].missed}
    return first or sorted(missed.intersection(by_rank)) or lost


def _behind(by_rank: Mapping[int, RankStatus], end: int | None, last: int) -> list[int]:
    return [rank for rank, status in by_rank.items() if _reached(status, end) < last]


def _reached(status: RankStatus, end: int | None) -> int:
    """The last number that the rank came to: after its last collective, its end, if that is in question."""
    ended_there = status.left == LEFT and status.count + 1 == end
    return status.count + ended_there


def unexplained(group: str, words: str, seq: int, waited: bool) -> GuardFinding:
    """The verdict where something is wrong and what the ranks told does not show what."""
    if waited:
        return GuardFinding(
            MISSING,
            f"collective number {seq} of {words} was not completed in time, though all ranks began it and are about to "
            "do the same: the connection between them is slow or broken. A larger timeout_sec may help.",
            group,
            seq,
        )
    return GuardFinding(
        MISMATCH,
        f"ranks of {words} did not run the same collectives: their digests differ at number {seq}, and what differed "
        "is older than the events that are still known. Use a smaller check_every, or mode 'strict'.",
        group,
        seq,
    )


def first_difference(statuses: Sequence[RankStatus]) -> tuple[int | None, dict[int, Judgement]]:
    """The first number at which the ranks that have come so far did different things, or None.

    And the numbers before it at which their labels differ without that being a fault.
    """
    first = max((t.events[0].seq for t in statuses if t.events), default=0)
    last = max((t.events[-1].seq for t in statuses if t.events), default=-1)
    judged: dict[int, Judgement] = {}
    for seq in range(first, last + 1):
        events = [event for status in statuses if (event := status.at(seq)) is not None]
        if len({event.digest for event in events}) > 1:
            return seq, judged
        if not same_labels(event.word for event in events):
            judgement = judge(events, _matched_before(statuses, events[0], seq))
            if judgement == "fault":
                return seq, judged
            judged[seq] = judgement
        if len(events) == len(statuses) and sum(t.balances.get(seq, 0) for t in statuses) & MASK:
            return seq, judged
    return None, judged


def _matched_before(statuses: Sequence[RankStatus], event: Event, seq: int) -> int:
    """How many names were equal on all ranks, at the place of ``event``, in what is known of earlier collectives."""
    site, found = str(event.site), set()
    for earlier in statuses[0].events:
        if earlier.seq < seq and earlier.word and str(earlier.site) == site:
            met = [status.at(earlier.seq) for status in statuses]
            if all(one is not None and one.word == earlier.word for one in met):
                found.add(earlier.word)
    return len(found)


def _doubt(group: str, words: str, by_rank: Mapping[int, RankStatus], judged: Mapping[int, Judgement]) -> GuardFinding:
    """Labels differ, and may: a warning for the first of which there is doubt, nothing where they are data."""
    doubtful = [seq for seq, judgement in judged.items() if judgement == "doubt"]
    if not doubtful:
        return GuardFinding(NOTHING, "", group, min(judged), doubts=tuple(judged))
    seq = doubtful[0]
    events = {rank: event for rank, t in by_rank.items() if (event := t.at(seq)) is not None}
    lines = [f"ranks of {words} combine values under different names (collective number {seq} of this group):"]
    lines += _table(_parties(events), events)
    lines.append(
        "It went on: nothing shows that these are not each rank's own data. If they are losses or metrics, the result "
        "mixes them. Say which it is: `with ddpstats.label(NAME):` around the call, with the name of what is reduced "
        "(ranks that differ in it get an error), or with one name on all ranks where the difference is meant. This "
        "place is not compared again."
    )
    return GuardFinding(DOUBT, "\n".join(lines), group, seq, by_rank=events, doubts=tuple(judged))


# -- a mismatch -------------------------------------------------------------------------------------------------------


def _mismatch(group: str, words: str, by_rank: Mapping[int, RankStatus], seq: int) -> GuardFinding:
    events = {rank: event for rank, t in by_rank.items() if (event := t.at(seq)) is not None}
    parties = _parties(events)
    culprits = _minority(parties, len(events))
    lines = [f"the ranks of {words} do not run the same collective (number {seq} of this group):"]
    lines += _table(parties, events)
    absent = [rank for rank in by_rank if rank not in events]
    if absent:
        lines.append(f"  {ranks_text(absent)}: {_whereabouts([by_rank[rank] for rank in absent], seq)}")
    lines.append(_last_agreed(by_rank, seq))
    difference, likely = what_differs([events[ranks[0]] for ranks in parties]), reasons(parties, events, by_rank, seq)
    lines.append(f"What differs: {difference}.")
    lines += [f"Likely: {reason}" for reason in likely]
    who = "Nothing here tells which rank is right."
    if culprits:
        who = f"Most ranks agree with each other, so look at {ranks_text(culprits)} first."
    in_order = not any(reason.startswith(("order swapped", "extra call")) for reason in likely)
    by_hand = any(event.word and event.evidence is None and event.label != BY_TORCH for event in events.values())
    lines.append(f"{who} {remedy(difference, in_order, by_hand)}")
    return GuardFinding(MISMATCH, "\n".join(lines), group, seq, tuple(absent), culprits, events)


def _parties(events: Mapping[int, Event]) -> list[list[int]]:
    """Ranks by what they did; the largest party first. Where that is the same the pieces make the difference."""
    found: dict[object, list[int]] = {}
    digests = {event.digest for event in events.values()}
    differ = len(digests) > 1 or not same_labels(event.word for event in events.values())
    for rank, event in sorted(events.items()):
        key = (event.digest, event.word) if differ else (event.pieces, rank)
        found.setdefault(key, []).append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _minority(parties: list[list[int]], total: int) -> tuple[int, ...]:
    if len(parties[0]) * 2 <= total or len(parties) < 2:
        return ()
    return tuple(sorted(rank for ranks in parties[1:] for rank in ranks))


def _table(parties: list[list[int]], events: Mapping[int, Event]) -> list[str]:
    lines = []
    for ranks in sorted(parties)[:_SHOWN_GROUPS]:
        event = events[ranks[0]]
        pieces = f", {event.pieces}" if event.pieces else ""
        lines.append(f"  {ranks_text(ranks)}: {event}{pieces}")
        of_site: dict[str, Event] = {}
        for rank in ranks:
            of_site.setdefault(str(events[rank].site), events[rank])
        for event in list(of_site.values())[:3]:
            lines += event.site_lines()
    if len(parties) > _SHOWN_GROUPS:
        lines.append(f"  and {len(parties) - _SHOWN_GROUPS} more kinds of call")
    return lines


def _last_agreed(by_rank: Mapping[int, RankStatus], seq: int) -> str:
    for status in by_rank.values():
        event = status.at(seq - 1)
        if event is not None:
            return f"Last collective on which they agreed: number {seq - 1}, {event}{event.at}."
    return "It is the first collective of this group that is known."


def what_differs(events: Sequence[Event]) -> str:
    """The first of operation, reduce op, root, dtype, shape and label in which the events differ."""
    for what, part in _PARTS:
        if len({part(event.signature) for event in events}) > 1:
            return what
    if not same_labels(event.word for event in events):
        return "the label: operation, shape and dtype are equal, but they are about different things"
    return "the pieces that ranks send to each other: what one rank sends is not what the other expects"


def remedy(difference: str, in_order: bool, by_hand: bool = False) -> str:
    """``difference``: as `what_differs` says it. Not ``in_order``: calls are swapped, or one is extra.
    ``by_hand``: the program itself gave the names."""
    if by_hand and difference.startswith("the label"):
        return _BY_HAND
    if not in_order and not difference.startswith("the label"):
        return _ORDER
    return next((fix for what, fix in _BY_DIFFERENCE.items() if difference.startswith(what)), _ORDER)


def reasons(
    parties: list[list[int]], events: Mapping[int, Event], by_rank: Mapping[int, RankStatus], seq: int
) -> list[str]:
    """What may have led to it, from what the ranks did before and after."""
    if len(parties) < 2:
        return []
    found = []
    one, other = by_rank[parties[0][0]], by_rank[parties[1][0]]
    a, b = ranks_text(parties[0]), ranks_text(parties[1])
    mine, yours = _digests(one, seq), _digests(other, seq)
    if len(mine) > 1 and len(yours) > 1 and mine[0] == yours[1] and mine[1] == yours[0]:
        found.append(f"order swapped: {a} and {b} run the same two collectives in different order.")
    elif mine[1:2] == yours[1:2]:
        pass  # they differ here alone
    elif len(mine) > 1 and yours[:1] == mine[1:2]:
        found.append(f"extra call on {a}, or a missing one on {b}: number {seq} of {b} is what {a} runs next.")
    elif len(yours) > 1 and mine[:1] == yours[1:2]:
        found.append(f"extra call on {b}, or a missing one on {a}: number {seq} of {a} is what {b} runs next.")
    found += _lacking(parties, events, by_rank)
    return found


def _digests(status: RankStatus, seq: int) -> list[tuple[int, int]]:
    return [(event.digest, event.word) for event in status.events if event.seq >= seq][:2]


def _lacking(parties: list[list[int]], events: Mapping[int, Event], by_rank: Mapping[int, RankStatus]) -> list[str]:
    lines = []
    for ranks in parties[:_SHOWN_GROUPS]:
        evidence = events[ranks[0]].evidence
        key = evidence.key if evidence is not None else ""
        if not key:
            continue
        lacking = [
            rank
            for others in parties
            for rank in others
            if others is not ranks and (names := _names(events[rank])) and key not in names
        ]
        if lacking:
            verb = "lacks" if len(lacking) == 1 else "lack"
            lines.append(f"{ranks_text(lacking)} {verb} key {key!r}, which {ranks_text(ranks)} reduces.")
    return lines


def _names(event: Event) -> Sequence[str]:
    return () if event.evidence is None else event.evidence.names


# -- a missing rank ---------------------------------------------------------------------------------------------------


def _missing(
    group: str, words: str, by_rank: Mapping[int, RankStatus], seq: int, missing: Iterable[int]
) -> GuardFinding:
    missing = tuple(sorted(missing))
    events = {rank: event for rank, t in by_rank.items() if (event := t.at(seq)) is not None}
    cycle = [
        rank
        for rank in missing
        if (there := by_rank[rank].waits_in) is not None and there[0] != group and not by_rank[rank].dead
    ]
    lines = [f"collective number {seq} of {words} was not completed:"]
    lines += _table(_parties(events), events) if events else []
    for rank in missing:
        lines.append(f"  {ranks_text([rank])}: {_whereabouts([by_rank[rank]], seq)}")
        stack = by_rank[rank].stack
        if stack and not by_rank[rank].dead and by_rank[rank].left is None and by_rank[rank].waits_in is None:
            lines += [f"      {line}" for line in stack.splitlines()]
    lines.append(_last_agreed(by_rank, seq))
    if cycle and len(cycle) == len(missing):
        lines.append(
            "Likely: order swapped between groups: ranks that are in two groups use them in different order, and wait "
            "for each other for ever."
        )
        return GuardFinding(MISMATCH, "\n".join(lines), group, seq, missing, (), events)
    if any(by_rank[rank].left == LEFT or _waits_behind(by_rank[rank], group, seq) for rank in missing):
        others = [rank for rank in by_rank if rank not in missing]
        if others:
            lines.append(f"Likely: extra call on {ranks_text(others)}, or a missing one on {ranks_text(missing)}.")
    if all(by_rank[rank].left == LEFT for rank in missing):
        lines.append(
            f"{ranks_text(missing)} had come to the end of the guarded program, or of its process group, without this "
            "call. Make all ranks issue the same collectives: the same keys, and as many steps."
        )
    else:
        lines.append(
            f"Look at the output of {ranks_text(missing)} first. A rank that is only slow needs a larger timeout_sec "
            "(or DDPSTATS_TIMEOUT_SEC)."
        )
    return GuardFinding(MISSING, "\n".join(lines), group, seq, missing, (), events)


def _waits_behind(status: RankStatus, group: str, seq: int) -> bool:
    """Whether the rank has come to the end of a step, and waits there for the others."""
    return status.waits_in is not None and status.waits_in[0] == group and status.waits_in[1] < seq


def _whereabouts(statuses: Sequence[RankStatus], seq: int) -> str:
    """Of ranks that are not in number ``seq``."""
    told = []
    for status in statuses:
        last = f"; its last known collective was {status.last}" if status.last else "; no collective of it is known"
        if status.is_silent and seq > 1:  # what its watchdog wrote is older than what the others agreed on with it
            last = ""
        if status.dead and (status.left is None or status.left == LEFT):
            told.append("the process is gone" + last)
        elif status.left is not None:
            told.append(f"{status.left}" + last)
        elif status.slept_sec:
            told.append(f"ran no Python for {status.slept_sec:.0f} s: stopped, or in a call that holds the GIL" + last)
        elif status.waits_in is not None:
            told.append(f"waits in number {status.waits_in[1]} of group {status.waits_in[0]!r}" + last)
        else:
            told.append("did not come" + last)
    return " | ".join(dict.fromkeys(told))
