"""Decides what the ranks of a group did differently, or which of them is missing, and says so in words.

For live verdicts and for records. Pure: the same statuses give the same text on every rank.

1. `find` looks for the first collective that differs. Labels that differ are a fault, a doubt or nothing: `judge` says.
2. Where a rank has waited too long, or some have come further than others, `_missing_ranks` says who is missing.
3. A message between two ranks is found by what both know of it: `pair_messages`.
4. The rest is words: what each rank did and where, what differs, what may have led to it, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpstats._base.text import ranks_text
from ddpstats.guard.event import BY_TORCH, MASK, MESSAGES, Event, Signature, same_labels
from ddpstats.guard.labels.judge import Judgement, judge
from ddpstats.guard.status import DOUBT, LEFT, MISMATCH, MISSING, NOTHING, GuardFinding, RankStatus

_SHOWN_GROUPS = 8

ByRank = Mapping[int, RankStatus]
DescribeBucket = Callable[[Event], str]
"""Returns what is in a tensor that torch's own code reduces; empty where that is not known."""


def find(
    group: str,
    words: str,
    statuses: Sequence[RankStatus],
    overdue: int | None = None,
    were_absent: Sequence[int] = (),
    tentative: bool = False,
    bucket_words: DescribeBucket = lambda event: "",
) -> GuardFinding | None:
    """Return the first thing that went wrong in ``group``, which ``words`` describe; None if all ranks agree.

    ``overdue``: a number that every rank should have reached, and in which some rank has waited too long, or cannot be
    joined by all any more. ``were_absent``: the ranks that had not come then. ``tentative``: only digests or labels
    differ so far; without ``overdue`` no rank has waited in vain, and none is missing; with it torch ended the wait.
    """
    by_rank = {status.rank: status for status in statuses}
    if group.endswith(MESSAGES):
        return _message_finding(group, words, by_rank, overdue is not None)
    seq, judged = first_difference(statuses)
    if seq is not None:
        return _mismatch(group, words, by_rank, seq, bucket_words)
    if overdue is not None or not tentative:
        missing = _missing_ranks(by_rank, overdue, were_absent)
        if missing is not None:
            return _missing(group, words, by_rank, *missing, bucket_words, tentative)
    return _doubt(group, words, by_rank, judged) if judged else None


def first_difference(statuses: Sequence[RankStatus]) -> tuple[int | None, dict[int, Judgement]]:
    """Return the first number at which the ranks that have come so far did different things, or None.

    With it the numbers before at which their labels differ without that being a fault.
    """
    first = max((status.events[0].seq for status in statuses if status.events), default=0)
    last = max((status.events[-1].seq for status in statuses if status.events), default=-1)
    judged: dict[int, Judgement] = {}
    for seq in range(first, last + 1):
        events = [event for status in statuses if (event := status.at(seq)) is not None]
        if len({event.digest for event in events}) > 1:
            return seq, judged
        if not same_labels(event.word for event in events):
            judgement = judge(events)
            if judgement == "fault":
                return seq, judged
            judged[seq] = judgement
        if len(events) == len(statuses) and sum(event.balance for event in events) & MASK:
            return seq, judged
    return None, judged


def _missing_ranks(
    by_rank: ByRank, overdue: int | None, were_absent: Sequence[int]
) -> tuple[int, Sequence[int]] | None:
    """Return the number that was not completed and the ranks it waits for, by the first rule that names some."""
    ended = overdue is not None and all(status.count < overdue for status in by_rank.values())
    end = overdue if ended else None  # the number of the ranks' end, in which no collective was begun
    if overdue is not None:
        asleep = [rank for rank, status in by_rank.items() if status.slept_sec]
        missing = _lost(by_rank, overdue, end) or _behind(by_rank, end, overdue) or asleep
        if missing:
            reached = [by_rank[rank].count for rank in missing if not by_rank[rank].is_silent]
            return min([overdue, *(count + 1 for count in reached)]), missing
    behind = _behind(by_rank, end, max(status.count for status in by_rank.values()))
    if behind:
        return min(by_rank[rank].count for rank in behind) + 1, behind
    if overdue is None:
        return None
    idle = [rank for rank, status in by_rank.items() if status.waits_in is None]
    if 0 < len(idle) < len(by_rank):
        gone = [rank for rank in idle if by_rank[rank].dead or by_rank[rank].left not in (None, LEFT)]
        return overdue, gone or idle
    late = [rank for rank in were_absent if rank in by_rank]  # all have come meanwhile
    return (overdue, late) if late else None


def _lost(by_rank: ByRank, overdue: int, end: int | None) -> list[int]:
    """Return the ranks that died or left by an error: others that are behind may only not have come yet.

    A rank that left because it missed another one is not at fault itself.
    """
    behind = _behind(by_rank, end, overdue)
    left = [rank for rank in behind if by_rank[rank].left not in (None, LEFT)]
    lost = [rank for rank, status in by_rank.items() if rank in left or (status.dead and status.left is None)]
    first = [rank for rank in lost if not by_rank[rank].missed]
    missed = {absent for rank in lost for absent in by_rank[rank].missed}
    return first or sorted(missed.intersection(by_rank)) or lost


def _behind(by_rank: ByRank, end: int | None, last: int) -> list[int]:
    return [rank for rank, status in by_rank.items() if _reached(status, end) < last]


def _reached(status: RankStatus, end: int | None) -> int:
    """The last number that the rank came to: after its last collective, its end, if that is in question."""
    ended_there = status.left == LEFT and status.count + 1 == end
    return status.count + ended_there


def unexplained(group: str, words: str, seq: int, waited: bool) -> GuardFinding:
    """The verdict where something is wrong and no status shows what."""
    what = "a message" if group.endswith(MESSAGES) else f"collective number {seq}"
    if waited:
        return GuardFinding(
            MISSING,
            f"{what} of {words} was not completed in time, though all ranks began it and are about to do the same: the "
            "connection between them is slow or broken. A larger timeout_sec may help.",
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


def _doubt(group: str, words: str, by_rank: ByRank, judged: Mapping[int, Judgement]) -> GuardFinding:
    """Labels differ, and may: a warning for the first that is in doubt, nothing where they are each rank's own data."""
    doubtful = [seq for seq, judgement in judged.items() if judgement == "doubt"]
    if not doubtful:
        return GuardFinding(NOTHING, "", group, min(judged), doubts=tuple(judged))
    seq = doubtful[0]
    events = _events_at(by_rank, seq)
    lines = [f"ranks of {words} combine values under different names (collective number {seq} of this group):"]
    lines += _table(_parties(events), events)
    remedy = _DOUBT_IN_A_LIBRARY if any(map(_is_of_a_library, events.values())) else _DOUBT_IN_THE_PROGRAM
    lines.append(
        "The program goes on, because these may be each rank's own data. If they are losses or metrics, the result "
        f"mixes them: make all ranks {remedy} This line is not compared again."
    )
    return GuardFinding(DOUBT, "\n".join(lines), group, seq, by_rank=events, doubts=tuple(judged))


_DOUBT_IN_THE_PROGRAM = (
    "go through the same keys in the same order. If the difference is meant, put the call into "
    "`with ddpstats.label(NAME):` with one name on all ranks."
)
_DOUBT_IN_A_LIBRARY = "log the same metrics in the same order. (A library makes this call.)"
_OF_A_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|^\(called by no line")


def _is_of_a_library(event: Event) -> bool:
    """Return whether no line of the program makes the call, so that nobody can put it into ``label``."""
    return _OF_A_LIBRARY.search(str(event.site)) is not None


# -- a mismatch -------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Something in which two collectives can differ, and what to do about it."""

    words: str
    of: Callable[[Signature], object]
    remedy: str


_SHAPE = "the shape"
_ORDER = "Make all ranks issue the same collectives in the same order."
_PARTS = (
    _Part("the operation", lambda signature: signature.op, _ORDER),
    _Part("the reduce op", lambda signature: signature.reduce_op, "Pass the same op= on all ranks."),
    _Part("the root", lambda signature: signature.root, "Pass the same src= or dst=, a global rank, on all ranks."),
    _Part(
        "the number of tensors",
        lambda signature: len(signature.sizes),
        "Pass as many tensors on all ranks: where a rank lacks one, zeros in its place.",
    ),
    _Part("the dtype", lambda signature: signature.dtypes, "Convert to one dtype on all ranks before the call."),
    _Part(
        _SHAPE,
        lambda signature: signature.sizes,
        "Pass tensors of one shape on all ranks: pad them to the largest.",
    ),
    _Part(
        "the memory format: elements of equal shape lie in different order",
        lambda signature: signature.strides,
        "Call .contiguous() on the tensor before the call, on all ranks.",
    ),
)
_LABEL = "the label: operation, shape and dtype are equal, but they are about different things"
_GRADIENTS = "the label: one reduces gradients, which torch does by itself, and the other is a call of the program"
_PIECES = "the pieces that ranks send to each other: what one rank sends is not what the other expects"
_OTHER_REMEDIES = {
    _LABEL: (
        "Make all ranks go through the same keys in the same order (sort them, and reduce zeros for a key that a rank "
        "lacks), or use ddpstats.reduce_stats; where the difference is meant, put the calls into `with "
        "ddpstats.label('...')` of one name on all ranks."
    ),
    _PIECES: "Make what each rank sends to another what that one expects: split sizes, shapes and dtypes.",
}
_ONE_MODEL = (
    "These are of a model: check first that all ranks build the same one, from the same configuration. Then gradients "
    "and parameters have the same shapes."
)
_OF_A_MODEL = re.compile(r"\.grad\b|param")
_LABEL_BY_HAND = (
    "ddpstats.label() gave these names: give the same one on all ranks where they reduce the same thing. Where they do "
    "not, make all ranks go through the same keys in the same order, or use ddpstats.reduce_stats, which aligns them."
)


def _mismatch(group: str, words: str, by_rank: ByRank, seq: int, bucket_words: DescribeBucket) -> GuardFinding:
    events = _events_at(by_rank, seq)
    parties = _parties(events)
    culprits = _minority(parties, len(events))
    lines = [f"the ranks of {words} do not run the same collective (number {seq} of this group):"]
    lines += _table(parties, events, bucket_words)
    absent = [rank for rank in by_rank if rank not in events]
    if absent:
        lines.append(f"  {ranks_text(absent)}: {_whereabouts([by_rank[rank] for rank in absent], seq)}")
    lines.append(_last_agreed(by_rank, seq))
    calls = [events[ranks[0]] for ranks in parties]
    differences = what_differs(calls)
    in_other_order = _other_order(parties, by_rank, seq) or _other_calls(differences, calls)
    lines.append(f"What differs: {' and '.join(differences)}.")
    lines += [f"Likely: {reason}" for reason in (*in_other_order, *_lacking(parties, events))]
    who = "The guard cannot tell which rank is right."
    if culprits:
        who = f"Most ranks agree with each other, so look at {ranks_text(culprits)} first."
    by_hand = any(event.word and event.evidence is None and event.label != BY_TORCH for event in events.values())
    advice = remedy(differences, bool(in_other_order), by_hand, all(map(_is_of_a_model, calls)))
    lines.append(f"{who} {advice}")
    return GuardFinding(MISMATCH, "\n".join(lines), group, seq, tuple(absent), culprits, events)


def what_differs(events: Sequence[Event]) -> list[str]:
    """Name everything in which the events differ; of other operations, or another number of tensors, nothing more."""
    signatures = [event.signature for event in events]
    differences = [words for words, part, _ in _PARTS if len({part(signature) for signature in signatures}) > 1]
    for whole in ("the operation", "the number of tensors"):
        if whole in differences:
            return differences[: differences.index(whole) + 1]
    if not same_labels(event.word for event in events):
        words = _GRADIENTS if any(event.label == BY_TORCH for event in events) else _LABEL
        differences.append("the label" if differences else words)
    return differences or [_PIECES]


def _is_of_a_model(event: Event) -> bool:
    """Return whether it is likely that the tensor is a gradient or a parameter."""
    return event.label == BY_TORCH or _OF_A_MODEL.search(event.source) is not None


def remedy(differences: Sequence[str], in_other_order: bool, by_hand: bool = False, is_of_a_model: bool = False) -> str:
    """Say what to do about `what_differs`. ``by_hand``: the program itself gave the labels."""
    first = differences[0]
    if first == _LABEL:
        return _LABEL_BY_HAND if by_hand else _OTHER_REMEDIES[_LABEL]
    if in_other_order:
        return _ORDER
    if first == _SHAPE and is_of_a_model:
        return _ONE_MODEL
    return next((part.remedy for part in _PARTS if part.words == first), _OTHER_REMEDIES.get(first, _ORDER))


def _other_order(parties: Sequence[Sequence[int]], by_rank: ByRank, seq: int) -> list[str]:
    """Say if the ranks run the same collectives in another order, or some rank one more, by what each runs next."""
    if len(parties) < 2:
        return []
    a, b = (ranks_text(ranks) for ranks in parties[:2])
    here, there = (_two_calls(by_rank[ranks[0]], seq) for ranks in parties[:2])
    if len(here) > 1 and len(there) > 1 and here == there[::-1]:
        return [f"the order is swapped: {a} and {b} run the same two collectives in different order."]
    if here[1:] == there[1:]:
        return []  # they differ here alone
    if here[1:] == there[:1]:
        return [f"{b} skipped a call, or {a} made one more: number {seq} of {b} is what {a} {_run(parties[0])} next."]
    if there[1:] == here[:1]:
        return [f"{a} skipped a call, or {b} made one more: number {seq} of {a} is what {b} {_run(parties[1])} next."]
    return []


def _run(ranks: Sequence[int]) -> str:
    return "runs" if len(ranks) == 1 else "run"


def _two_calls(status: RankStatus, seq: int) -> list[tuple[int, int]]:
    return [(event.digest, event.word) for event in status.events if event.seq >= seq][:2]


def _other_calls(differences: Sequence[str], calls: Sequence[Event]) -> list[str]:
    """Say if the calls differ in several things, and so are not one call with a wrong argument."""
    arguments = {part.words for part in _PARTS[1:]}
    other_line = differences[0] in arguments and len({str(event.site) for event in calls}) > 1
    if len(differences) + other_line < 2 and differences[0] != _GRADIENTS:
        return []
    return ["these are two different calls: some rank skipped a call, or made one more."]


def _lacking(parties: Sequence[Sequence[int]], events: Mapping[int, Event]) -> Iterator[str]:
    """Say which ranks have no such key as others reduce."""
    for ranks in parties[:_SHOWN_GROUPS] if len(parties) > 1 else ():
        evidence = events[ranks[0]].evidence
        key = evidence.key if evidence is not None else ""
        lacking = [
            rank
            for others in parties
            for rank in others
            if others is not ranks and (names := _names(events[rank])) and key not in names
        ]
        if key and lacking:
            verb = "lacks" if len(lacking) == 1 else "lack"
            reduce = "reduces" if len(ranks) == 1 else "reduce"
            yield f"{ranks_text(lacking)} {verb} key {key!r}, which {ranks_text(ranks)} {reduce}."


def _names(event: Event) -> Sequence[str]:
    return () if event.evidence is None else event.evidence.names


def _events_at(by_rank: ByRank, seq: int) -> dict[int, Event]:
    return {rank: event for rank, status in by_rank.items() if (event := status.at(seq)) is not None}


def _parties(events: Mapping[int, Event]) -> list[list[int]]:
    """Group ranks by what they did; the largest group first. Where that is the same the pieces make the difference."""
    parties: dict[object, list[int]] = {}
    digests = {event.digest for event in events.values()}
    differ = len(digests) > 1 or not same_labels(event.word for event in events.values())
    for rank, event in sorted(events.items()):
        key = (event.digest, event.word) if differ else (event.pieces, rank)
        parties.setdefault(key, []).append(rank)
    return sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))


def _minority(parties: Sequence[Sequence[int]], total: int) -> tuple[int, ...]:
    if len(parties[0]) * 2 <= total or len(parties) < 2:
        return ()
    return tuple(sorted(rank for ranks in parties[1:] for rank in ranks))


def _table(
    parties: list[list[int]], events: Mapping[int, Event], bucket_words: DescribeBucket = lambda event: ""
) -> list[str]:
    lines = []
    for ranks in sorted(parties)[:_SHOWN_GROUPS]:
        event = events[ranks[0]]
        pieces = event.pieces or (bucket_words(event) if event.label == BY_TORCH else "")
        lines.append(f"  {ranks_text(ranks)}: {event}{', ' if pieces else ''}{pieces}")
        by_site: dict[str, Event] = {}
        for rank in ranks:
            by_site.setdefault(str(events[rank].site), events[rank])
        for event in list(by_site.values())[:3]:
            lines += event.site_lines()
    if len(parties) > _SHOWN_GROUPS:
        lines.append(f"  and {len(parties) - _SHOWN_GROUPS} more kinds of call")
    return lines


def _last_agreed(by_rank: ByRank, seq: int) -> str:
    for status in by_rank.values():
        event = status.at(seq - 1)
        if event is not None:
            return f"Last collective on which they agreed: number {seq - 1}, {event}{event.at}."
    return "It is the first collective of this group." if seq == 1 else "No earlier collective of this group is known."


# -- a missing rank ---------------------------------------------------------------------------------------------------


def _missing(
    group: str,
    words: str,
    by_rank: ByRank,
    seq: int,
    missing: Sequence[int],
    bucket_words: DescribeBucket,
    was_ended_by_torch: bool,
) -> GuardFinding:
    missing = tuple(sorted(missing))
    for rank in missing:
        waits_in = by_rank[rank].waits_in
        if waits_in is not None and waits_in[0] == group + MESSAGES and not by_rank[rank].dead:
            unknown = unexplained(group + MESSAGES, words, seq, True)
            return _message_finding(group + MESSAGES, words, by_rank, True) or unknown
    events = _events_at(by_rank, seq)
    lines = [f"collective number {seq} of {words} was not completed:"]
    lines += _table(_parties(events), events, bucket_words) if events else []
    for rank in missing:
        status = by_rank[rank]
        lines.append(f"  {ranks_text([rank])}: {_whereabouts([status], seq)}")
        if status.stack and not status.dead and status.left is None and status.waits_in is None:
            lines += [f"      {line}" for line in status.stack.splitlines()]
    lines.append(_last_agreed(by_rank, seq))
    if all(_waits_in_another_group(by_rank[rank], group) for rank in missing):
        lines.append(
            "Likely: the order is swapped between groups, and ranks wait for each other for ever. Make all ranks use "
            "their groups in the same order."
        )
        return GuardFinding(MISMATCH, "\n".join(lines), group, seq, missing, (), events)
    others = [rank for rank in by_rank if rank not in missing]
    if others and any(by_rank[rank].left == LEFT or _waits_behind(by_rank[rank], group, seq) for rank in missing):
        lines.append(f"Likely: {ranks_text(missing)} skipped a call, or {ranks_text(others)} made one more.")
    if all(by_rank[rank].left == LEFT for rank in missing):
        lines.append(
            f"{ranks_text(missing)} had come to the end of the guarded program, or of its process group, without this "
            "call. Make all ranks issue the same collectives: the same keys, and as many steps."
        )
    else:
        is_slow = any(by_rank[rank].left is None and not by_rank[rank].dead for rank in missing)
        larger = _LONGER_GROUP_TIMEOUT if was_ended_by_torch else _LARGER_TIMEOUT
        lines.append(f"Look at the output of {ranks_text(missing)} first.{f' {larger}' if is_slow else ''}")
    return GuardFinding(MISSING, "\n".join(lines), group, seq, missing, (), events)


_LARGER_TIMEOUT = "A rank that is only slow needs a larger timeout_sec (or DDPSTATS_TIMEOUT_SEC)."
_LONGER_GROUP_TIMEOUT = (
    "A rank that is only slow needs a longer timeout of the process group: init_process_group(timeout=...), or "
    "new_group(timeout=...). Where timeout_sec or DDPSTATS_TIMEOUT_SEC is set, make that larger, too."
)


def _waits_in_another_group(status: RankStatus, group: str) -> bool:
    return status.waits_in is not None and status.waits_in[0] != group and not status.dead


def _waits_behind(status: RankStatus, group: str, seq: int) -> bool:
    """Return whether the rank has come to the end of a step, and waits there for the others."""
    return status.waits_in is not None and status.waits_in[0] == group and status.waits_in[1] < seq


def _whereabouts(statuses: Sequence[RankStatus], seq: int) -> str:
    """Say where ranks are that are not in number ``seq``."""
    words = []
    for status in statuses:
        last = f"; its last known collective was {status.last}" if status.last else "; no collective of it is known"
        if status.is_silent and seq > 1:  # what its watchdog wrote is older than what the others agreed on with it
            last = ""
        state = "did not come"
        if status.dead and (status.left is None or status.left == LEFT):
            state = "the process is gone"
        elif status.left is not None:
            state = status.left
        elif status.slept_sec:
            state = f"ran no Python for {status.slept_sec:.0f} s: stopped, or in a call that holds the GIL"
        elif status.waits_in is not None and status.waits_in[0].endswith(MESSAGES):
            state = "waits for a message"
        elif status.waits_in is not None:
            state = f"waits in number {status.waits_in[1]} of group {status.waits_in[0]!r}"
        words.append(state + last)
    return " | ".join(dict.fromkeys(words))


# -- messages between two ranks ---------------------------------------------------------------------------------------

Pair = tuple[int, int, int, int]
"""A sender, which of its messages, the receiver, which of its messages: the two sides of one message."""


def pair_messages(messages: Mapping[int, Sequence[Event]]) -> tuple[list[Pair], list[tuple[int, int]]]:
    """Return the messages that both ranks know of, and (rank, which of its messages) of those that only one knows of.

    A message whose number is 0 is in neither: see `MessageNumbers`.
    """
    sides: dict[object, dict[str, tuple[int, int]]] = {}
    for rank, events in messages.items():
        for index, event in enumerate(events):
            if event.peer is not None and event.seq:
                sends = event.signature.op == "send"
                ends = (rank, event.peer) if sends else (event.peer, rank)
                key = event.group, *ends, event.tag, event.seq
                sides.setdefault(key, {})[event.signature.op] = rank, index
    pairs = [(*side["send"], *side["recv"]) for side in sides.values() if len(side) == 2]
    return pairs, [at for side in sides.values() if len(side) == 1 for at in side.values()]


def message_mismatch(messages: Mapping[int, Sequence[Event]]) -> GuardFinding | None:
    """Return a finding for the first message that is not what its receiver expects."""
    for sender, sent_at, receiver, received_at in pair_messages(messages)[0]:
        sent, received = messages[sender][sent_at], messages[receiver][received_at]
        expected, given = received.signature, sent.signature
        if expected.sizes == given.sizes and expected.dtypes == given.dtypes:
            continue
        what = "the dtype" if expected.dtypes != given.dtypes else "the shape"
        lines = [
            "a message is not what its receiver expects:",
            *call_lines(sender, sent),
            *call_lines(receiver, received),
            f"What differs: {what}.",
            "Make both ranks pass tensors of one shape and dtype, in the same order per tag.",
        ]
        by_rank = {sender: sent, receiver: received}
        return GuardFinding(MISMATCH, "\n".join(lines), received.group, received.seq, (), (), by_rank)
    return None


def _message_finding(group: str, words: str, by_rank: ByRank, is_overdue: bool) -> GuardFinding | None:
    """Return what is wrong with the messages of these ranks; if nothing is, the one that a rank waits for too long."""
    finding = message_mismatch({rank: status.messages for rank, status in by_rank.items()})
    if finding is not None or not is_overdue:
        return finding
    for rank, status in by_rank.items():
        event = status.message_waited_for()
        if event is not None and event.group == group:
            peer = by_rank.get(event.peer) if event.peer is not None else None
            other = None if peer is None else _crossing(status, event, peer)
            if other is not None and peer is not None:
                return _both_wait(event, rank, words, other, peer.rank)
            return unmatched(event, rank, words, peer)
    return None


def unmatched(event: Event, rank: int, words: str, peer: RankStatus | None) -> GuardFinding:
    """Return the finding for a message that did not come through in time.

    ``peer``: the rank that it was to go to, or come from; None where any rank will do.
    """
    is_sent, here = event.signature.op == "send", ranks_text([rank])
    there = "any rank" if peer is None else ranks_text([peer.rank])
    if is_sent:
        head = f"{here} sends a message to {there}, which has not received it ({words}):"
    else:
        head = f"{here} waits for a message from {there}, which has not come ({words}):"
    lines = [head, *call_lines(rank, event)]
    sent = [message for message in peer.messages if message.peer == rank] if peer is not None and not is_sent else []
    last = next((message for message in reversed(sent) if message.signature.op == "send"), None)
    if last is not None:
        lines += [f"  {there}: its last message to {here} was {last}", *last.site_lines()[:1]]
    elif peer is not None:
        lines.append(f"  {there}: {_state_of_peer(peer)}")
    if last is not None and last.tag != event.tag:
        lines.append("What differs: the tag.")
    lines.append(_message_advice(event, rank, peer))
    if not is_sent and last is None:
        lines.append("A guard sees no message that was sent before it began: if that is so here, begin it earlier.")
    missing = () if peer is None else (peer.rank,)
    return GuardFinding(MISSING, "\n".join(lines), event.group, event.seq, missing, (), {rank: event})


def _crossing(status: RankStatus, event: Event, peer: RankStatus) -> Event | None:
    """Return the other rank's message where that waits as this one does: both to receive, or both to send.

    None where one of them has sent, or is about to receive, something that does not fit: then that is the fault.
    """
    other = peer.message_waited_for()
    if other is None or other.peer != status.rank or other.signature.op != event.signature.op or peer.dead:
        return None
    messages = {
        known.rank: [message for message in known.messages if message.peer in (status.rank, peer.rank)]
        for known in (status, peer)
    }
    alone = pair_messages(messages)[1]
    return other if all(messages[rank][at].signature.op == event.signature.op for rank, at in alone) else None


def _both_wait(event: Event, rank: int, words: str, other: Event, peer: int) -> GuardFinding:
    op, answer = event.signature.op, "receive" if event.signature.op == "send" else "send"
    did = "send a message to each other" if op == "send" else "wait to receive a message from each other"
    calls = sorted([(rank, event), (peer, other)], key=lambda call: call[0])
    lines = [f"ranks {calls[0][0]} and {calls[1][0]} both {did} ({words}):"]
    lines += [line for call in calls for line in call_lines(*call)]
    lines.append(f"Let one of them {answer} first, or use dist.batch_isend_irecv on both.")
    return GuardFinding(MISSING, "\n".join(lines), event.group, event.seq, (peer,), (), dict(calls))


def call_lines(rank: int, event: Event) -> list[str]:
    """Return lines for a message: what a rank called, and where."""
    return [f"  {ranks_text([rank])}: {event}", *event.site_lines()]


def _state_of_peer(peer: RankStatus) -> str:
    state = "it runs, and has made no such call"
    if peer.dead:
        state = "its process is gone"
    elif peer.left is not None:
        state = peer.left.replace(LEFT, "it has come to the end of the guarded program, or of its process group,", 1)
    return f"{state.rstrip(',')}; its last known call was {peer.last}" if peer.last else f"{state}; no call is known"


def _message_advice(event: Event, rank: int, peer: RankStatus | None) -> str:
    if peer is not None and peer.dead:
        return f"Look at the output of {ranks_text([peer.rank])} first."
    op, answer = event.signature.op, "receive" if event.signature.op == "send" else "send"
    there = "some rank" if peer is None else ranks_text([peer.rank])
    call = f"recv(src={rank}, tag={event.tag})" if op == "send" else f"send(dst={rank}, tag={event.tag})"
    advice = (
        f"Make {there} call dist.{call} with a tensor of this shape and dtype, or leave out the call of rank {rank}."
    )
    last, towards = "" if peer is None else peer.last or "", "to" if op == "send" else "from"
    if last.startswith(f"{op}(") and f" {towards} rank {rank}, " in last:
        advice += f" Where both ranks {op} first, let one of them {answer} first."
    return f"{advice} {_LARGER_TIMEOUT}"
