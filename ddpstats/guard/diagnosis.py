"""Decides what the ranks of a group did differently, or which of them is missing, and says so in words.

For live verdicts and for records. Pure: the same statuses give the same text on every rank.

1. `find` looks for the first collective that differs. Labels that differ are a fault, a doubt or nothing: `judge` says.
2. Where a rank has waited too long, or some have come further than others, `_missing_ranks` says who is missing.
3. A message between two ranks is found by what both know of it: `pair_messages`.
4. The rest is words: what each rank did and where, what differs, what may have led to it, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from ddpstats._base.text import Rank, ranks_text
from ddpstats._ranks.failure import IS_ABSENT, IS_GONE, SLOW, Answer, Packed, find_missing
from ddpstats.guard.event import (
    BY_TORCH,
    MASK,
    MESSAGES,
    Event,
    Signature,
    as_dicts,
    from_dicts,
    newest_in_a_row,
    same_labels,
)
from ddpstats.guard.labels.judge import Judgement, judge

MISMATCH, MISSING, DOUBT, NOTHING = "mismatch", "missing", "doubt", "nothing"
LEFT = "left the guard"
_SHOWN_GROUPS = 8


# -- statuses and findings --------------------------------------------------------------------------------------------


def message_place(event: Event) -> int:
    """Return the number of a message in `RankStatus.waits_in`: when it began, in microseconds."""
    return int(event.started * 1e6)


# How fields that hold events are read from JSON.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "events": lambda entries: newest_in_a_row(from_dicts(entries)),
    "messages": lambda entries: [*map(Event.from_dict, entries)],
    "by_rank": lambda entries: {rank: Event.from_dict(entry) for rank, entry in entries.items()},
}

T = TypeVar("T", bound="WithEvents")


class WithEvents(Packed):
    """A dataclass with events that travels through the store."""

    def pack(self) -> str:
        return json.dumps(vars(self), default=Event.as_dict)

    @classmethod
    def from_json(cls: type[T], values: Any) -> T:
        try:
            for name in _READERS.keys() & values.keys():
                values[name] = _READERS[name](values[name])
            return super().from_json(values)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"no {cls.__name__}: {error!r}") from None


@dataclass(frozen=True)
class RankStatus(WithEvents):
    """One rank's status, as far as it is known.

    ``events``: of the group in question, oldest first, without gaps. ``messages``: its newest, by their numbers.
    ``count``: how many collectives of the group the rank began. ``waits_in``: what it waits in now: (group, seq, words
    for the group) or None. ``left``: how it left the guard, if it did. ``dead``: its process is gone. ``stack``: of its
    main thread. ``slept_sec``: how long its process ran no Python lately, where that was for most of the timeout.
    ``is_idle``: its program has begun no collective for a while and waits in none, but for a device, perhaps.
    """

    rank: int
    events: Sequence[Event] = ()
    count: int = 0
    waits_in: tuple[str, int, str] | None = None
    last: str | None = None
    left: str | None = None
    dead: bool = False
    stack: str | None = None
    slept_sec: float = 0.0
    messages: tuple[Event, ...] = ()
    is_idle: bool = False

    def pack(self) -> str:
        return json.dumps({**vars(self), "events": [*as_dicts(self.events)]}, default=Event.as_dict)

    @property
    def is_silent(self) -> bool:
        """True where the rank itself has reported nothing of this group: its ``count`` is 0 for that reason alone."""
        return not self.events and not self.count and self.stack is None and self.left is None

    def waits_for(self, group: str, before: int | None = None) -> bool:
        """Return whether the rank waits in that group, in a number ``before`` that one if it is given."""
        name, number, *_ = self.waits_in or ("", 0)
        return not self.dead and name == group and (before is None or number < before)

    def at(self, seq: int) -> Event | None:
        """The rank's event of that number; None if it has none, or not any more."""
        if not self.events:
            return None
        index = seq - self.events[0].seq
        return self.events[index] if 0 <= index < len(self.events) else None

    def message_waited_for(self) -> Event | None:
        """Return the message that the rank waits for now."""
        if self.waits_in is None or not self.waits_in[0].endswith(MESSAGES):
            return None
        return next((event for event in self.messages if message_place(event) == self.waits_in[1]), None)


@dataclass(frozen=True)
class GuardFinding(WithEvents):
    """A verdict. ``kind`` is `MISMATCH` or `MISSING`; `NOTHING`: the alarm was a false one, and all ranks go on;
    `DOUBT`: they go on, with a warning. ``doubts``: numbers of collectives whose labels differ and may do so.
    ``printer``: the rank that prints the error whole; None where each rank has concluded alone, and prints it itself.
    ``readers``: how many ranks are alive, and are to have the error before one of them ends.
    """

    kind: str
    message: str
    group: str
    seq: int
    missing: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()
    by_rank: Mapping[int, Event] = field(default_factory=dict)
    doubts: tuple[int, ...] = ()
    printer: int | None = None
    readers: int = 0

    @property
    def is_error(self) -> bool:
        return self.kind in (MISMATCH, MISSING)


@dataclass(frozen=True)
class Alarm(Packed):
    """An alarm says what is in question. ``ranks``: of the group, in its order; of a message, its two.

    ``overdue``: whether all ranks should have reached ``seq`` by now. ``tentative``: it may turn out to be nothing.
    """

    group: str
    words: str
    ranks: tuple[int, ...]
    seq: int
    overdue: bool
    tentative: bool = False


@dataclass(frozen=True)
class Departure(Packed):
    """The way in which a rank left the guard. ``counts``: group -> the collectives that it began there."""

    how: str
    counts: Mapping[str, int]


for _kind in (RankStatus, GuardFinding):  # before there are threads: see `ddpstats._ranks.exchange`
    msgspec.json.Decoder(_kind)

ByRank = Mapping[int, RankStatus]


# -- the first thing that went wrong ----------------------------------------------------------------------------------


def find(alarm: Alarm, statuses: Sequence[RankStatus]) -> GuardFinding | None:
    """Return the first thing that went wrong in the alarm's group; None if all ranks agree.

    ``statuses``: of its ranks. Where the alarm is ``overdue``, some rank has waited in its ``seq`` too long, or cannot
    be joined by all any more. Where it is ``tentative``, only digests or labels differ so far; unless it is overdue no
    rank has waited in vain, and none is missing.
    """
    group, words, overdue = alarm.group, alarm.words, alarm.seq if alarm.overdue else None
    if group.endswith(MESSAGES):
        return _message_finding(group, words, {status.rank: status for status in statuses}, alarm.overdue)
    named = {rank: Rank(rank, group_rank) for group_rank, rank in enumerate(alarm.ranks)}
    by_rank = {named.get(status.rank, status.rank): status for status in statuses}
    seq, judged = first_difference(statuses)
    if seq is not None:
        return _mismatch(group, words, by_rank, seq)
    missing = None if alarm.tentative and overdue is None else _missing_ranks(by_rank, overdue)
    if missing is not None:
        return _missing(group, words, by_rank, *missing)
    if not judged and alarm.tentative:  # labels may differ for good reasons
        return GuardFinding(NOTHING, "", group, overdue or 0, doubts=_find_partly_labelled(statuses))
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


def _find_partly_labelled(statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    """Return the numbers of collectives for which some ranks have a label and others have none."""
    events = [event for status in statuses for event in status.events]
    labelled = {event.seq for event in events if event.word}
    return tuple(sorted(labelled & {event.seq for event in events if not event.word}))


def find_unexplained(group: str, words: str, seq: int, waited: bool) -> GuardFinding:
    """Return the verdict where something is wrong and no status shows what."""
    message = (
        f"ranks of {words} did not run the same collectives: their digests differ at number {seq}, and what differed "
        "is older than the events that are still known. Use a smaller check_every, or mode 'strict'."
    )
    if waited:
        message = (
            f"{name_of(group, seq)} of {words} was not completed in time, though all ranks began it and are about to "
            "do the same: the connection between them is slow or broken. A larger timeout_sec may help."
        )
    return GuardFinding(MISSING if waited else MISMATCH, message, group, seq)


def name_of(group: str, seq: int) -> str:
    return "a message" if group.endswith(MESSAGES) else f"collective number {seq}"


def _doubt(group: str, words: str, by_rank: ByRank, judged: Mapping[int, Judgement]) -> GuardFinding:
    """Warn of the first labels that are in doubt; say nothing where all are each rank's own data."""
    seq = next((seq for seq, judgement in judged.items() if judgement == "doubt"), None)
    if seq is None:
        return GuardFinding(NOTHING, "", group, min(judged), doubts=tuple(judged))
    events = _events_at(by_rank, seq)
    lines = [f"ranks of {words} combine values under different names (collective number {seq} of this group):"]
    lines += _table(_parties(events), events)
    lines.append(
        "The program goes on, because these may be each rank's own data. If they are losses or metrics, the result "
        "mixes them: make all ranks go through the same keys in the same order, or log the same metrics in the same "
        f"order where a library makes the call. {_IF_MEANT} This line is not compared again."
    )
    return GuardFinding(DOUBT, "\n".join(lines), group, seq, by_rank=events, doubts=tuple(judged))


# -- a mismatch -------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Something in which two collectives can differ, and what to do about it."""

    words: str
    remedy: str
    of: Callable[[Signature], object] = lambda signature: None


_ORDER = "Make all ranks issue the same collectives in the same order."
_OPERATION = Difference("the operation", _ORDER, lambda signature: signature.op)
_COUNT = Difference(
    "the number of tensors", "Pass as many of them on all ranks.", lambda signature: len(signature.sizes)
)
_ARGUMENTS = (
    Difference("the reduce op", "Pass the same op= on all ranks.", lambda signature: signature.reduce_op),
    Difference("the root", "Pass the same src= or dst= on all ranks.", lambda signature: signature.root),
    Difference("the dtype", "Convert to one dtype on all ranks before the call.", lambda signature: signature.dtypes),
    Difference(
        "the shape",
        "Pass tensors of one shape on all ranks: pad them to the largest. Where they are gradients or parameters, make "
        "all ranks build the same model, from the same configuration. Where they stack the values of a dict, give all "
        "ranks the same keys.",
        lambda signature: signature.sizes,
    ),
    Difference(
        "the memory format: elements of equal shape lie in different order",
        "Call .contiguous() on the tensor before the call, on all ranks.",
        lambda signature: signature.strides,
    ),
)
_IF_MEANT = "If the difference is meant, put your call into `with ddpstats.label(NAME):`, with one name on all ranks."
_LABEL = Difference(
    "the label: operation, shape and dtype are equal, but the names of the tensors are not",
    "Make all ranks go through the same keys in the same order (sort them, and reduce zeros for a key that a rank "
    f"lacks), or use ddpstats.reduce_stats. {_IF_MEANT}",
)
_LABEL_TOO = Difference("the label", _LABEL.remedy)
_GRADIENTS = Difference("the label: one reduces gradients, as torch does; the other is a call of the program", _ORDER)
_PIECES = Difference(
    "the pieces that ranks send to each other: what one rank sends is not what the other expects",
    "Compare the split sizes, shapes and dtypes, in the order of the ranks: what rank 0 sends to rank 1 has to be what "
    "rank 1 expects from rank 0.",
)


def _mismatch(group: str, words: str, by_rank: ByRank, seq: int) -> GuardFinding:
    events = _events_at(by_rank, seq)
    parties = _parties(events)
    lines = [f"the ranks of {words} do not run the same collective (number {seq} of this group):"]
    lines += _table(parties, events)
    absent = [rank for rank in by_rank if rank not in events]
    lines += [f"  {ranks_text([rank])}: {_whereabouts(by_rank[rank], seq)}" for rank in absent[:_SHOWN_GROUPS]]
    lines.append(_last_agreed(by_rank, seq))
    calls = [events[ranks[0]] for ranks in parties]
    differences = what_differs(calls)
    in_other_order = _other_order(parties, by_rank, seq) or _other_calls(differences, calls)
    lines.append(f"What differs: {' and '.join(difference.words for difference in differences)}.")
    lines += [f"Likely: {reason}" for reason in (*in_other_order, *_say_lacking(parties, events))]
    culprits = tuple(sorted(events.keys() - parties[0])) if 2 * len(parties[0]) > len(events) else ()
    who = "The guard cannot tell which rank is right."
    if culprits:
        who = f"Most ranks agree with each other, so look at {ranks_text(culprits)} first."
    is_in_order = differences[0] is _LABEL or not in_other_order
    lines.append(f"{who} {differences[0].remedy if is_in_order else _ORDER}")
    return GuardFinding(MISMATCH, "\n".join(lines), group, seq, tuple(absent), culprits, events)


def what_differs(events: Sequence[Event]) -> list[Difference]:
    """Return everything in which the events differ; of other operations, or another number of tensors, nothing more."""

    def differ(difference: Difference) -> bool:
        return len({difference.of(event.signature) for event in events}) > 1

    for whole in (_OPERATION, _COUNT):
        if differ(whole):
            return [whole]
    differences = list(filter(differ, _ARGUMENTS))
    if not same_labels(event.word for event in events):
        by_torch = any(event.label == BY_TORCH for event in events)
        differences.append(_LABEL_TOO if differences else _GRADIENTS if by_torch else _LABEL)
    return differences or [_PIECES]


def _other_order(parties: Sequence[Sequence[int]], by_rank: ByRank, seq: int) -> list[str]:
    """Say if two ranks run the same collectives in another order, or one of them one more, by what each runs next."""
    if len(parties) < 2:
        return []
    a, b = (ranks_text(ranks) for ranks in parties[:2])
    events_of = [[event for event in by_rank[ranks[0]].events if event.seq >= seq] for ranks in parties[:2]]
    of_a, of_b = ([(event.digest, event.word) for event in events[:2]] for events in events_of)
    if len(of_a) > 1 and of_a == of_b[::-1]:
        return [f"the order is swapped: {a} and {b} run the same two collectives in different order."]
    if of_a[1:] == of_b[1:]:
        return []  # they differ here alone
    pairs = (a, of_a, b, of_b), (b, of_b, a, of_a)
    return [_say_skip(late, early, second[1:]) for early, first, late, second in pairs if first[1:] == second[:1]][:1]


def _say_skip(behind: str, ahead: str, next_calls: object = True) -> str:
    """Say so, or that the call may still come where no ``next_calls`` of the rank that is behind are known."""
    return f"{behind} skipped a call{'' if next_calls else ' or makes it later'}, or {ahead} made one more."


def _other_calls(differences: Sequence[Difference], calls: Sequence[Event]) -> list[str]:
    """Say if the calls differ in several things, and so are not one call with a wrong argument."""
    other_line = differences[0] in (_COUNT, *_ARGUMENTS) and len({str(event.site) for event in calls}) > 1
    if len(differences) + other_line < 2 and differences[0] is not _GRADIENTS:
        return []
    return ["these are two different calls: some rank skipped a call, or made one more."]


def _say_lacking(parties: Sequence[Sequence[int]], events: Mapping[int, Event]) -> Iterator[str]:
    """Say which ranks have no such key as others reduce."""
    names = {rank: event.evidence.names for rank, event in events.items() if event.evidence is not None}
    for ranks in parties[:_SHOWN_GROUPS] if len(parties) > 1 else ():
        evidence = events[ranks[0]].evidence
        key = "" if evidence is None else evidence.key
        lacking = [rank for rank, held in names.items() if key and held and rank not in ranks and key not in held]
        if lacking:
            lack, reduce = "lacks" if len(lacking) == 1 else "lack", "reduces" if len(ranks) == 1 else "reduce"
            yield f"{ranks_text(lacking)} {lack} key {key!r}, which {ranks_text(ranks)} {reduce}."


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


def _table(parties: list[list[int]], events: Mapping[int, Event]) -> list[str]:
    lines = [line for ranks in sorted(parties)[:_SHOWN_GROUPS] for line in call_lines(ranks, events[ranks[0]])]
    if len(parties) > _SHOWN_GROUPS:
        lines.append(f"  and {len(parties) - _SHOWN_GROUPS} more kinds of call")
    return lines


def call_lines(ranks: Sequence[int], event: Event) -> list[str]:
    """Return lines for a message: what ranks called, and where."""
    pieces = f", {event.pieces}" if event.pieces else ""
    return [f"  {ranks_text(ranks)}: {event}{pieces}", *event.site_lines()]


def _last_agreed(by_rank: ByRank, seq: int) -> str:
    for status in by_rank.values():
        event = status.at(seq - 1)
        if event is not None:
            return f"Last collective on which they agreed: number {seq - 1}, {event}{event.at}."
    return "It is the first collective of this group." if seq == 1 else "No earlier collective of this group is known."


# -- a missing rank ---------------------------------------------------------------------------------------------------


def _missing_ranks(by_rank: ByRank, overdue: int | None) -> tuple[int, tuple[int, ...]] | None:
    """Return the number that was not completed and the ranks it waits for, by the first rule that names some."""
    last = max(status.count for status in by_rank.values())
    is_end = overdue is not None and last < overdue  # of the ranks, in which no collective was begun
    reached = {rank: Answer(status.count + (is_end and status.left == LEFT), ()) for rank, status in by_rank.items()}
    rules: list[tuple[int, Collection[int]]] = [(last, find_missing(by_rank, last, reached, is_over=True) or ())]
    if overdue is not None:
        behind = find_missing(by_rank, overdue, reached, is_over=True) or ()
        failed = [rank for rank, status in by_rank.items() if status.left not in (None, LEFT)]
        # They left because they missed another rank, so they are not at fault themselves.
        followers = {rank for rank in failed if str(by_rank[rank].left).startswith(f"{LEFT} by RankMissing")}
        dead = [rank for rank, status in by_rank.items() if status.dead and status.left is None]
        idle = [rank for rank, status in by_rank.items() if status.waits_in is None]
        rules = [
            (overdue, {*dead, *set(failed).intersection(behind)} - followers),
            (overdue, set(behind) - followers),  # they may only not have come yet
            (overdue, behind),
            (overdue, [rank for rank, status in by_rank.items() if status.slept_sec]),
            *rules,
            (overdue, failed),  # in the middle of it
            (overdue, idle if len(idle) < len(by_rank) else ()),
        ]
    for number, ranks in rules:
        if ranks:
            missing = tuple(sorted(ranks))
            counts = [by_rank[rank].count for rank in missing if not by_rank[rank].is_silent]
            return min([number, *(count + 1 for count in counts)]), missing
    return None


def _missing(group: str, words: str, by_rank: ByRank, seq: int, missing: tuple[int, ...]) -> GuardFinding:
    for rank in missing:
        if by_rank[rank].waits_for(group + MESSAGES):
            unknown = find_unexplained(group + MESSAGES, words, seq, True)
            return _message_finding(group + MESSAGES, words, by_rank, True) or unknown
    events = _events_at(by_rank, seq)
    lines = [f"collective number {seq} of {words} was not completed:"]
    lines += _table(_parties(events), events)
    for rank in missing:
        status = by_rank[rank]
        is_here = status.waits_in is None or status.waits_in[0] == group
        lines.append(f"  {ranks_text([rank])}: {_whereabouts(status, seq, group)}")
        if status.stack and not status.dead and status.left is None and is_here:
            lines += [f"      {line}" for line in status.stack.splitlines()]
    lines.append(_last_agreed(by_rank, seq))
    waits = [by_rank[rank].waits_in for rank in missing if not by_rank[rank].dead]
    if len(waits) == len(missing) and all(wait is not None and wait[0] != group for wait in waits):
        lines.append(
            "Likely: a rank skipped a call, or the order is swapped between groups, and ranks wait for each other for "
            "ever. Make all ranks issue the same calls, and use their groups in the same order."
        )
        return GuardFinding(MISMATCH, "\n".join(lines), group, seq, missing, (), events)
    others = [rank for rank in by_rank if rank not in missing]
    if others and any(by_rank[rank].left == LEFT or by_rank[rank].waits_for(group, seq) for rank in missing):
        lines.append(f"Likely: {_say_skip(ranks_text(missing), ranks_text(others))}")
    if all(by_rank[rank].left == LEFT for rank in missing):
        lines.append(
            f"{ranks_text(missing)} had come to the end of the guarded program, or of its process group, without this "
            "call. Make all ranks issue the same collectives: the same keys, and as many steps."
        )
    else:
        may_be_slow = any(not by_rank[rank].dead and by_rank[rank].left is None for rank in missing)
        lines.append(f"Look at the output of {ranks_text(missing)} first.{_IF_SLOW if may_be_slow else ''}")
    return GuardFinding(MISSING, "\n".join(lines), group, seq, missing, (), events)


_IF_SLOW = f" {SLOW} timeout: that of its process group, and timeout_sec (or DDPSTATS_TIMEOUT_SEC) where it is set."


def _whereabouts(status: RankStatus, seq: int = 1, group: str = "") -> str:
    """Say where a rank is that is not in number ``seq`` of ``group``."""
    last = f"; its last known collective was {status.last}" if status.last else "; no collective of it is known"
    if status.is_silent and seq > 1:  # what its watchdog wrote is older than what the others agreed on with it
        last = ""
    state = IS_ABSENT
    if status.dead and status.left in (None, LEFT):
        state = IS_GONE
    elif status.left is not None:
        state = status.left
    elif status.slept_sec:
        state = f"ran no Python for {status.slept_sec:.0f} s: stopped, or in a call that holds the GIL"
    elif status.waits_in is not None and status.waits_in[0].endswith(MESSAGES):
        state = "waits for a message"
    elif status.waits_in is not None and status.waits_in[0] == group and status.waits_in[1] >= status.count:
        state = "waits for the other ranks"
    elif status.waits_in is not None:
        state = f"waits in number {status.waits_in[1]} of {status.waits_in[2]}"
        if f"waits in {status.last}".startswith(f"{state}, "):
            return f"waits in {status.last}"
    return state + last


# -- messages between two ranks ---------------------------------------------------------------------------------------

# A sender, which of its messages, the receiver, which of its messages: the two sides of one message.
MessagePair = tuple[int, int, int, int]

_UNSEEN = "A guard sees no message that was sent before it began: if that is so here, begin it earlier."


def pair_messages(messages: Mapping[int, Sequence[Event]]) -> tuple[list[MessagePair], list[tuple[int, int]]]:
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
        expected, passed = received.signature, sent.signature
        if expected.sizes == passed.sizes and expected.dtypes == passed.dtypes:
            continue
        lines = [
            "a message is not what its receiver expects:",
            *call_lines([sender], sent),
            *call_lines([receiver], received),
            f"What differs: {'the dtype' if expected.dtypes != passed.dtypes else 'the shape'}.",
            f"Make both ranks pass tensors of one shape and dtype, in the same order per tag. {_UNSEEN}",
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
            return find_unmatched(event, rank, words, None if event.peer is None else by_rank.get(event.peer))
    return None


def find_unmatched(event: Event, rank: int, words: str, peer: RankStatus | None) -> GuardFinding:
    """Return the finding for a message that did not come through in time.

    ``peer``: the rank that it was to go to, or come from; None where any rank will do.
    """
    is_sent, waiting = event.signature.op == "send", ranks_text([rank])
    partner = "any rank" if peer is None else ranks_text([peer.rank])
    op, answer, call = "receive", "send", f"send(dst={rank:d}, tag={event.tag})"
    head = f"{waiting} waits for a message from {partner}, which has not come ({words}):"
    if is_sent:
        op, answer, call = "send", "receive", f"recv(src={rank:d}, tag={event.tag})"
        head = f"{waiting} sends a message to {partner}, which has not received it ({words}):"
    lines = [head, *call_lines([rank], event)]
    messages = () if peer is None or is_sent else peer.messages
    sent = [message for message in messages if (message.peer, message.signature.op) == (rank, "send")]
    if sent:
        lines += [f"  {partner}: its last message to {waiting} was {sent[-1]}", *sent[-1].site_lines()[:1]]
        lines += ["What differs: the tag."] if sent[-1].tag != event.tag else []
    elif peer is not None:
        lines.append(f"  {partner}: {_whereabouts(peer)}")
    if peer is not None and (peer.dead or peer.left not in (None, LEFT)):
        lines.append(f"Look at the output of {partner} first.")
    else:
        lines.append(
            f"Make {partner} call dist.{call} with a tensor of this shape and dtype, or leave out the call of "
            f"{waiting}. Where both ranks {op} first, let one of them {answer} first.{_IF_SLOW}"
        )
        if not is_sent and not sent:
            lines.append(_UNSEEN)
    missing = () if peer is None else (peer.rank,)
    return GuardFinding(MISSING, "\n".join(lines), event.group, event.seq, missing, by_rank={rank: event})
