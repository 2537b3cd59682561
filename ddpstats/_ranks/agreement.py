"""One collective that also proves that all ranks made the same call; and what they tell each other where they did not.

1. Each rank writes what it has to add up, and control lanes, into the group's buffer (`lanes`).
2. One all_reduce(SUM). It is never conditional: a rank that is stale or failed takes part and says so in its lanes.
3. Control lanes clean: all ranks made the same call with the same in common (`Site`). The sums are the answer.
4. Not clean, on every rank alike: every rank tells every rank its status (`tell`). What is wrong raises the same error
   everywhere; else all ranks know the same, derive from it what they have in common now, and go back to 1.

What ranks have in common changes only after all of them have agreed, and is computed from what all ranks know.
"""

from __future__ import annotations

import hashlib
import struct
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from ddpstats._base.text import ranks_text
from ddpstats._ranks.codec import fingerprint
from ddpstats._ranks.comm import Comm
from ddpstats._ranks.lanes import HEADER_LANES, Buffer, Seal, capacity_for
from ddpstats._ranks.status import (
    AGREED_BYTES,
    Failure,
    Status,
    Statuses,
    decode_status,
    encode_status,
    refuse_what_is_wrong,
)
from ddpstats.errors import ProtocolMismatch

MAX_ROUNDS = 4
"""How often a call is tried again after ranks have agreed anew."""

_MAX_SITES = 1024
_MOST_NUMBERS = capacity_for(HEADER_LANES) - HEADER_LANES
_MAX_PAYLOAD_BYTES = 1 << 30
_MAX_MEETING_BYTES = 1 << 24  # of what all ranks tell all ranks, numbers included
_MOST_BROADCASTS = 16  # one after the other
_MAX_TOGETHER_BYTES = 1 << 28  # of what all ranks tell all ranks instead
_OTHER_POLICY_BYTES = 16  # by so much the name of one policy may be longer than that of another
_HEAD = struct.Struct("<Q16s")
_STATUS_LENGTH = struct.Struct("<I")


SealKey = tuple[str, str | None, str, str | None]


@dataclass(frozen=True)
class Call:
    """What stays the same from one call of one place in the program to the next."""

    kind: str
    name: str | None
    nonfinite: str
    timeout_sec: float
    per_rank: bool = False
    """Whether every rank gets every rank's values besides: a collective more, so all ranks must ask for it."""

    @cached_property
    def skips(self) -> bool:
        return self.nonfinite == "skip"

    @cached_property
    def site_key(self) -> tuple[str, str | None]:
        return self.kind, self.name

    @cached_property
    def seal_key(self) -> SealKey:
        return self.kind, self.name, self.nonfinite, "per_rank" if self.per_rank else None


@dataclass
class Counters:
    """Of one reducer; `ddpstats.ReductionCounters` is the frozen copy that users see."""

    calls: int = 0
    collectives: int = 0
    renegotiations: int = 0
    payload_bytes: int = 0


@dataclass
class Site:
    """What all ranks have in common for one name. This one: nothing, as a decision needs."""

    seals: dict[SealKey, Seal] = field(default_factory=dict, init=False)

    extra_bytes: ClassVar[int] = 1
    """The least that a rank tells beside its status."""

    @property
    def agreed(self) -> bytes:
        """What ranks must have in common before they send anything whose size depends on it, in 8 bytes."""
        return bytes(AGREED_BYTES)

    @property
    def body(self) -> bytes:
        """Of the status of a rank that holds nothing."""
        return b""

    def lanes(self, world_size: int) -> int:
        """How many float64 a call takes."""
        return HEADER_LANES


class DamagedError(Exception):
    """Bytes from a peer that are not what it announced. Of this rank alone: the channel tells the others."""


class Agreement:
    """All calls on one group, one at a time. Not thread-safe: `channel` puts calls in order."""

    def __init__(self, comm: Comm, group_name: str) -> None:
        self.comm, self.group_name = comm, group_name
        self.world_size, self.position = len(comm.ranks), comm.ranks.index(comm.rank)
        self.sites: OrderedDict[tuple[str, str | None], Site] = OrderedDict()
        self.buffer = Buffer(capacity_for(HEADER_LANES))
        self.collectives = 0  # of this group so far: how ranks tell each other where they wait
        self._nothing = Site()
        self.deadline = 0.0

    def decide(self, call: Call, flag: bool | Failure, counters: Counters) -> float:
        """How many ranks' flags are set. Every rank must call."""
        return self.ask(call, flag if isinstance(flag, Failure) else [[float(flag)]], counters)[0]

    def ask(self, call: Call, numbers: Sequence[Sequence[float]] | Failure, counters: Counters) -> list[float]:
        """The sum of each number over all ranks; one list after the other. Every rank must call, with as many.

        At most `_MOST_NUMBERS`: they find room in the smallest buffer, which all groups have.
        """
        counters.calls += 1
        site, seal = self._nothing, self.seal(call, self._nothing)
        failure = numbers if isinstance(numbers, Failure) else None
        room = seal.room if failure is None else seal.room_with(failure.extra_bytes)
        self.buffer.seal(seal, room, stale=False, failed=failure is not None)
        given = array("d", () if isinstance(numbers, Failure) else [one for part in numbers for one in part])
        end = HEADER_LANES + len(given)
        assert len(given) <= _MOST_NUMBERS
        self.buffer.lanes[HEADER_LANES:end] = given
        if not self.sum(call, site, counters):
            self.tell(call, status_of(call, site, failure, stale=False), counters)
        return list(self.buffer.lanes[HEADER_LANES:end])

    # -- the one collective -------------------------------------------------------------------------------------------

    def seal(self, call: Call, site: Site) -> Seal:
        """What the lanes of this call hold if all ranks make it."""
        seal = site.seals.get(call.seal_key)
        if seal is None:
            parts = ("" if part is None else "=" + part for part in call.seal_key)
            text = "\0".join(parts).encode("utf-8", "surrogatepass")
            status = len(encode_status(status_of(call, site, None, stale=False))) + _OTHER_POLICY_BYTES
            packet = _HEAD.size + _STATUS_LENGTH.size + status + site.extra_bytes
            seal = Seal.of(fingerprint(text + b"\0" + site.agreed), self.world_size, packet)
            site.seals[call.seal_key] = seal
        return seal

    def sum(self, call: Call, site: Site, counters: Counters) -> bool:
        """Add up what is in the buffer, over all ranks; whether all of them made the same call, and none is stale."""
        self.count(counters, self.buffer.capacity * 8)
        self.comm.all_reduce_sum(self.buffer.tensor, self.deadline - time.monotonic())
        return self.buffer.is_agreed(self.seal(call, site))

    def count(self, counters: Counters, payload_bytes: int) -> None:
        """Before each collective of ours."""
        if self.world_size == 1:
            return  # plain arithmetic: nothing is sent
        self.collectives += 1
        counters.collectives += 1
        counters.payload_bytes += payload_bytes

    # -- sites --------------------------------------------------------------------------------------------------------

    def keep(self, call: Call, site: Site) -> None:
        """All ranks have this in common now; the buffer is made large enough for it."""
        self.sites[call.site_key] = site
        self.resize()

    def drop_oldest(self) -> None:
        """Where there are too many names, the one that was not used for longest goes, on all ranks alike."""
        if len(self.sites) > _MAX_SITES:
            self.sites.popitem(last=False)
            self.resize()

    def resize(self) -> None:
        needed = max((site.lanes(self.world_size) for site in self.sites.values()), default=HEADER_LANES)
        if capacity_for(needed) != self.buffer.capacity:
            self.buffer = Buffer(capacity_for(needed))

    # -- where the lanes were not clean -------------------------------------------------------------------------------

    def meeting_room(self) -> int | None:
        """The room for what any rank has to tell; None where all of that would be too much for every rank to have."""
        room = self.buffer.room()
        return room if room is not None and room * self.world_size <= _MAX_MEETING_BYTES else None

    def tell(
        self, call: Call, status: Status, counters: Counters, extra: bytes = b"\0"
    ) -> tuple[Statuses, list[bytes] | None]:
        """Every rank's status, and the extra bytes of every rank, None where they would be too many.

        Raises what is wrong with the call, on every rank alike.
        """
        counters.renegotiations += 1
        room = self.meeting_room()
        extras: list[bytes] | None = None
        if room is not None:
            everyone, extras = self._meet(encode_status(status), extra, room, call, counters)
        else:
            everyone = self.exchange(encode_status(status), call, counters)
        statuses: Statuses = [(decode_status(payload), ranks) for payload, ranks in everyone]
        refuse_what_is_wrong(statuses, self.group_name)
        return statuses, extras

    def _meet(
        self, status: bytes, extra: bytes, room: int, call: Call, counters: Counters
    ) -> tuple[list[tuple[bytes, tuple[int, ...]]], list[bytes]]:
        """Every distinct status with the ranks that hold it, and every rank's extra bytes, in one collective."""
        content = _STATUS_LENGTH.pack(len(status)) + status + extra
        packet = bytearray(room)
        packet[: _HEAD.size] = _HEAD.pack(len(content), hashlib.blake2b(content, digest_size=16).digest())
        packet[_HEAD.size : _HEAD.size + len(content)] = content
        if len(packet) != room:
            raise DamagedError(f"{len(packet)} bytes to tell, where {room} were announced")
        self.count(counters, room)
        holders: dict[bytes, list[int]] = {}
        extras: list[bytes] = []
        for rank, received in zip(
            self.comm.ranks, self.comm.all_gather(packet, self.deadline - time.monotonic()), strict=True
        ):
            size, expected = _HEAD.unpack_from(received)
            told = bytes(received[_HEAD.size : _HEAD.size + size])
            if len(told) < _STATUS_LENGTH.size or hashlib.blake2b(told, digest_size=16).digest() != expected:
                raise DamagedError(f"what {ranks_text([rank])} sent arrived damaged")
            end = _STATUS_LENGTH.size + _STATUS_LENGTH.unpack_from(told)[0]
            holders.setdefault(told[_STATUS_LENGTH.size : end], []).append(rank)
            extras.append(told[end:])
        return [(held, tuple(ranks)) for held, ranks in holders.items()], extras

    def exchange(self, payload: bytes, call: Call, counters: Counters) -> list[tuple[bytes, tuple[int, ...]]]:
        """Every rank's payload, each distinct one once, with the ranks that hold it.

        First the digests of all ranks, of fixed size; then one broadcast per distinct payload. In the usual program
        all ranks but a few hold the same, so this stays small where gathering everything would not. Where many hold
        what no other does, one gather takes the place of as many broadcasts.
        """
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        self.count(counters, _HEAD.size)
        heads = self.comm.all_gather(_HEAD.pack(len(payload), digest), self.deadline - time.monotonic())
        holders: dict[bytes, list[int]] = {}
        for position, head in enumerate(heads):
            holders.setdefault(bytes(head), []).append(position)
        largest = max(_HEAD.unpack(head)[0] for head in holders)
        if largest > _MAX_PAYLOAD_BYTES:
            raise ProtocolMismatch(f"a peer announces {largest} bytes of schema; at most {_MAX_PAYLOAD_BYTES} are read")
        everyone: Sequence[bytes | bytearray] | None = None
        if len(holders) > _MOST_BROADCASTS and largest * self.world_size <= _MAX_TOGETHER_BYTES:
            self.count(counters, largest)
            everyone = self.comm.all_gather(payload.ljust(largest, b"\0"), self.deadline - time.monotonic())
        found: list[tuple[bytes, tuple[int, ...]]] = []
        for head, positions in holders.items():
            (size, expected), first = _HEAD.unpack(head), positions[0]
            if everyone is None:
                self.count(counters, size)
                mine = payload if self.comm.ranks[first] == self.comm.rank else None
                received = self.comm.broadcast(mine, size, first, self.deadline - time.monotonic())
            else:
                received = bytes(everyone[first][:size])
            if hashlib.blake2b(received, digest_size=16).digest() != expected:
                raise DamagedError(f"what {ranks_text([self.comm.ranks[first]])} sent arrived damaged")
            found.append((received, tuple(self.comm.ranks[position] for position in positions)))
        return found


def status_of(call: Call, site: Site, failure: Failure | None, *, stale: bool, body: bytes | None = None) -> Status:
    """This rank's; ``body`` where it holds something."""
    return Status(
        call=call.kind,
        name=call.name,
        nonfinite=call.nonfinite,
        per_rank=call.per_rank,
        failure=failure,
        stale=stale,
        agreed=site.agreed,
        body=site.body if body is None else body,
    )
