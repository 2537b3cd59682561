"""Point-to-point, compared between the two ranks it concerns.

In strict mode a sender leaves a note in the store: what it sends, under which tag, and where in the program. A receiver
reads it before it takes the data: a blocking ``recv`` before it is even posted (nothing can arrive earlier anyhow), an
``irecv`` when it is waited for. The n-th send and the n-th receive of one pair of ranks and one tag belong together.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.files import parse_json
from ddpstats._base.text import ranks_text
from ddpstats._ranks.store import GLANCE_SEC, StoreSilent, bounded
from ddpstats.guard.event import Event
from ddpstats.guard.record import RankRecord
from ddpstats.guard.status import LEFT, MISMATCH, MISSING, GuardFinding, RankStatus

_LONGEST_POLL_SEC = 0.005
_MAX_NOTE_BYTES = 1 << 16
_KEPT_NOTES = 1024


@dataclass(frozen=True)
class Awaited:
    """A message that this rank is to receive."""

    event: Event
    source: int
    key: str


class Messages:
    """This rank's sends and receives in one group. ``store``: for this group and guard alone."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = bounded(store), rank
        self._count: Counter[tuple[int, int, int | None]] = Counter()
        self._mine: deque[str] = deque(maxlen=_KEPT_NOTES)
        self._taken_from_any: set[int | None] = set()  # tags

    def sent(self, event: Event) -> None:
        """Leave the note; never waits."""
        assert event.peer is not None
        note = json.dumps(event.as_dict())
        key = self._key(self._rank, event.peer, event.tag)
        self._store.set(key, note)
        self._mine.append(key)
        stem, _, number = key.rpartition("/")
        if int(number) > _KEPT_NOTES:  # nobody has read it in all that time
            self._store.delete_key(f"{stem}/{int(number) - _KEPT_NOTES}")
        self._store.set(f"p2p/last/{self._rank}-{event.peer}", note)

    def awaited(self, event: Event) -> Awaited | None:
        """What the receive of ``event`` pairs with; None where that cannot be known."""
        if event.peer is None:
            self._taken_from_any.add(event.tag)
        if event.peer is None or event.tag in self._taken_from_any:
            return None  # from now on nobody can count which message is which
        return Awaited(event, event.peer, self._key(event.peer, self._rank, event.tag))

    def unread(self) -> int:
        """How many of this rank's last messages have a receiver that has not yet looked at their notes."""
        while self._mine and not self._store.check([self._mine[0]]):
            self._mine.popleft()
        return sum(self._store.check([key]) for key in self._mine)

    def _key(self, source: int, to: int, tag: int | None) -> str:
        self._count[source, to, tag] += 1
        return f"p2p/{source}-{to}/{tag}/{self._count[source, to, tag]}"

    def compare(self, awaited: Awaited, watch: Callable[[], None]) -> GuardFinding | None:
        """Wait for the sender's note; a finding if it is about something else. Raises what ``watch`` raises."""
        poll_sec = 2e-5
        while not self._has_come(awaited.key):
            time.sleep(poll_sec)
            poll_sec = min(1.5 * poll_sec, _LONGEST_POLL_SEC)
            watch()
        sent = _read(self._store.get(awaited.key))
        found = None if sent is None else compare_pair(sent, awaited.source, awaited.event, self._rank)
        if found is None:  # else the sender sees that it is still there, and waits to be told
            self._store.delete_key(awaited.key)
        return found

    def _has_come(self, key: str) -> bool:
        try:
            with self._store.within(GLANCE_SEC):
                return self._store.check([key])
        except StoreSilent:  # how long it may be is for `watch` to say
            return False

    def last_from(self, source: int) -> Event | None:
        """The last message that ``source`` sent to this rank, if it sent any."""
        note = self._store.find(f"p2p/last/{source}-{self._rank}")
        return None if note is None else _read(note)


def unmatched(event: Event, rank: int, words: str, last: Event | None, peer: RankStatus | None) -> GuardFinding:
    """A message that did not come through in time. ``last``: what the sender sent last, where that is known.

    ``peer``: the rank it was to go to, or come from; None where any rank will do.
    """
    sends, here = event.signature.op == "send", ranks_text([rank])
    there = "any rank" if peer is None else ranks_text([peer.rank])
    if sends:
        head = f"{here} sends a message to {there}, which has not received it ({words}):"
    else:
        head = f"{here} waits for a message from {there}, which has not come ({words}):"
    lines = [head, *_told(rank, event)]
    if not sends and last is not None:
        lines += [f"  {there}: its last message to {here} was {last}", *last.site_lines()[:1]]
    elif peer is not None:
        lines.append(f"  {there}: {_whereabouts(peer)}")
    if not sends and last is not None and last.tag != event.tag:
        lines.append("What differs: the tag.")
    lines.append(_advice(event, rank, peer, sends))
    if not sends and last is None:
        lines.append("A guard sees no message that was sent before it began: if that is so here, begin it earlier.")
    missing = () if peer is None else (peer.rank,)
    return GuardFinding(MISSING, "\n".join(lines), event.group, event.seq, missing, (), {rank: event})


def _told(rank: int, event: Event) -> list[str]:
    return [f"  {ranks_text([rank])}: {event}", *event.site_lines()]


def _whereabouts(peer: RankStatus) -> str:
    state = "it runs, and has made no such call"
    if peer.dead:
        state = "its process is gone"
    elif peer.left is not None:
        state = peer.left.replace(LEFT, "it has come to the end of the guarded program, or of its process group,", 1)
    return f"{state.rstrip(',')}; its last known call was {peer.last}" if peer.last else f"{state}; no call is known"


def _advice(event: Event, rank: int, peer: RankStatus | None, sends: bool) -> str:
    if peer is not None and peer.dead:
        return f"Look at the output of {ranks_text([peer.rank])} first."
    there = "some rank" if peer is None else ranks_text([peer.rank])
    call = f"recv(src={rank}, tag={event.tag})" if sends else f"send(dst={rank}, tag={event.tag})"
    lines = (
        f"Make {there} call dist.{call} with a tensor of this shape and dtype, or leave out the call of rank {rank}."
    )
    last = "" if peer is None else peer.last or ""
    if last.startswith(f"{event.signature.op}(") and f" with rank {rank}, " in last:
        lines += (
            f" Where both ranks {event.signature.op} first, let one of them {'receive' if sends else 'send'} first."
        )
    return f"{lines} A rank that is only slow needs a larger timeout_sec (or DDPSTATS_TIMEOUT_SEC)."


def compare_pair(sent: Event, source: int, received: Event, receiver: int) -> GuardFinding | None:
    """A finding if a message is not what its receiver expects. Pure."""
    mine, yours = received.signature, sent.signature
    if mine.shapes == yours.shapes and mine.dtypes == yours.dtypes:
        return None
    what = "the dtype" if mine.dtypes != yours.dtypes else "the shape"
    lines = ["a message is not what its receiver expects:", *_told(source, sent), *_told(receiver, received)]
    lines.append(f"What differs: {what}.")
    lines.append("Make both ranks pass tensors of one shape and dtype, in the same order per tag.")
    by_rank = {source: sent, receiver: received}
    return GuardFinding(MISMATCH, "\n".join(lines), received.group, received.seq, (), (), by_rank)


def match_records(records: Sequence[RankRecord]) -> GuardFinding | None:
    """The first message, in the records of all ranks, that is not what its receiver expects."""
    events_of = {record.rank: record.events for record in records}
    for source, sent, to, received in pair_messages(records):
        found = compare_pair(events_of[source][sent], source, events_of[to][received], to)
        if found is not None:
            return found
    return None


def pair_messages(records: Sequence[RankRecord]) -> Iterator[tuple[int, int, int, int]]:
    """(sender, which of its events, receiver, which of its events) of each message that both ranks recorded."""
    for source, sends, to, receives in _streams(records):
        for one, other in zip(sends, receives, strict=False):
            yield source, one, to, other


def unpaired(records: Sequence[RankRecord]) -> Iterator[tuple[RankRecord, int, RankRecord]]:
    """(rank, which of its events, the other rank, which recorded none that goes with it): the first of each stream."""
    by_rank = {record.rank: record for record in records}
    for source, sends, to, receives in _streams(records):
        rank, peer, more = (source, to, sends) if len(sends) > len(receives) else (to, source, receives)
        if len(sends) != len(receives):
            yield by_rank[rank], more[min(len(sends), len(receives))], by_rank[peer]


def _streams(records: Sequence[RankRecord]) -> Iterator[tuple[int, list[int], int, list[int]]]:
    """(sender, which of its events, receiver, which of its events), of all messages of one group and tag.

    Not of ranks that have dropped older lines: nobody can count how many messages these were. Not where the receiver
    takes from any rank, for then nobody can count which message is which.
    """
    messages_of = {record.rank: record.messages for record in records if record.complete}
    from_any = {
        (rank, event.group, event.tag)
        for rank, messages in messages_of.items()
        for _, event in messages
        if event.peer is None
    }
    found: dict[tuple[int, int, str, int | None], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank, messages in messages_of.items():
        for place, event in messages:
            if event.peer is not None:
                sends = event.signature.op == "send"
                source, to = (rank, event.peer) if sends else (event.peer, rank)
                found[source, to, event.group, event.tag][not sends].append(place)
    for (source, to, group, tag), (sent, received) in found.items():
        if source in messages_of and to in messages_of and (to, group, tag) not in from_any:
            yield source, sent, to, received


def _read(payload: bytes) -> Event | None:
    """A note that cannot be read is none: the message itself may still be right."""
    try:
        if len(payload) > _MAX_NOTE_BYTES:
            return None
        return Event.from_dict(parse_json(payload))
    except ValueError:
        return None
