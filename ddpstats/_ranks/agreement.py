"""One collective that also proves that all ranks made the same call, and what ranks exchange where they did not.

1. Each rank writes what it has to add up, and control lanes, into the group's buffer.
2. One all_reduce(SUM). It is never conditional: a rank that is stale or failed takes part and says so in its lanes.
3. Control lanes clean: all ranks made the same call with the same in common (`Site`). The sums are the answer.
4. Not clean, on every rank: every rank sends every rank its status (`Agreement.exchange_statuses`). What is wrong
   raises the same error everywhere; otherwise all ranks know the same, derive from it what they have in common now, and
   go back to 1.

::

    lane  0..7   fingerprint of the call, as four 16-bit numbers x and their squares
          8      ranks that are stale               (control: sums must equal what agreement gives, to the bit)
          9      ranks that failed to prepare
         10      ranks that are partial: some slot without a plain, finite value of the call's weight
         11      weight of the call
         12..    weighted sums | weights | codes, back to back; of questions: their numbers

A sum alone does not prove that all ranks sent the same x: the sum of x and the sum of x squared do, since W ranks with
sums S1 and S2 agree exactly where S1 = W x and S2 = W x squared (the variance is zero). Both stay exact in float64 for
fewer than 2**21 ranks.

The size of the buffer is the capacity of the group, the same on all ranks and for all names: where calls of two names
are paired, their buffers have one size, and the lanes show the mistake. A buffer sized from a rank's own keys would
abort the process.
"""

from __future__ import annotations

import hashlib
import struct
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch

from ddpstats._base.caches import EmptiedCache
from ddpstats._base.text import ranks_text
from ddpstats._ranks.comm import Comm, CommFailed, as_byte_tensor
from ddpstats._ranks.exchange import (
    AGREED_BYTES,
    Call,
    Failure,
    Status,
    Statuses,
    decode_status,
    encode_status,
    fingerprint,
    refuse_what_is_wrong,
)
from ddpstats._ranks.store import wait_for
from ddpstats.errors import InvalidStats

PARTIAL, WEIGHT = 10, 11  # lanes; before them are the control lanes, of which 8 is "stale" and 9 "failed"
_CONTROL_LANES = 10
HEADER_LANES = 12
_BYTES = 8
_HEADER = struct.Struct(f"={HEADER_LANES}d")

_MAX_SITES = 1024
_MAX_GATHERED_BYTES = 1 << 34  # of what all ranks send all ranks, together
_BROADCAST_BYTES = 1 << 20  # a broadcast more takes about as long as it takes to receive these
_HEAD = struct.Struct("<Q16s")
_WATCH_SEC, _DEVICE_POLL_SEC = 0.1, 0.0005  # while this rank waits for its device


def capacity_for(lanes: int) -> int:
    """Return ``lanes`` rounded up by at most an eighth, so that a layout may grow a little without a new buffer."""
    step = max(64, (1 << (lanes - 1).bit_length()) // 16)
    return -(-lanes // step) * step


_MOST_NUMBERS = capacity_for(HEADER_LANES) - HEADER_LANES


@dataclass(frozen=True)
class Seal:
    """The control lanes of "this call, this policy, this layout": as a rank sends them, and their sums if all agree."""

    lanes: tuple[float, ...]
    agreed: bytes

    @classmethod
    def of(cls, digest: bytes, world_size: int) -> Seal:
        lanes = tuple(float(v) for x in struct.unpack("<4H", digest) for v in (x, x * x))
        return cls(lanes, array("d", [lane * world_size for lane in lanes] + [0.0, 0.0]).tobytes())


@dataclass
class Site:
    """The state that all ranks have in common for one name; empty for decisions and gathers."""

    seals: EmptiedCache[Call, Seal] = field(default_factory=lambda: EmptiedCache(_MAX_SITES), init=False)

    @property
    def agreed(self) -> bytes:
        """8 bytes that ranks must have in common before they send anything whose size depends on it."""
        return bytes(AGREED_BYTES)

    @property
    def lanes(self) -> int:
        """The number of float64 that a call takes."""
        return HEADER_LANES


class Buffer:
    """Memory that Python writes and torch sums, without a copy between the two."""

    def __init__(self, capacity: int) -> None:
        self._raw = bytearray(capacity * _BYTES)
        self.tensor = torch.frombuffer(self._raw, dtype=torch.float64)
        self.control_lanes = memoryview(self._raw)[: _CONTROL_LANES * _BYTES]
        self.lanes = memoryview(self._raw).cast("d")
        self.capacity = capacity

    def seal(
        self, seal: Seal, *, stale: bool = False, failed: bool = False, partial: bool = True, weight: float = 0.0
    ) -> None:
        """Write the control lanes. A call that is stale or failed needs no more."""
        _HEADER.pack_into(self._raw, 0, *seal.lanes, stale, failed, partial, weight)


class DamagedError(Exception):
    """Bytes from a peer that are not what it announced. Of this rank alone: the channel reports it to the others."""


class Agreement:
    """All calls on one group, one at a time. Not thread-safe: `calls` puts calls in order.

    ``deadline`` (time.monotonic) and ``counters`` (of a `ReductionCounters`) are those of the call that is under way:
    all its collectives count.
    """

    def __init__(self, comm: Comm, group_name: str) -> None:
        self.comm, self.group_name = comm, group_name
        self.world_size, self.position = len(comm.ranks), comm.ranks.index(comm.rank)
        self.sites: OrderedDict[tuple[str, str | None], Site] = OrderedDict()
        self.buffer = Buffer(capacity_for(HEADER_LANES))
        self.collectives = 0  # of this group so far: how ranks report to each other where they wait
        self.deadline = 0.0
        self.counters = self._uncounted = Counter[str]()
        self._nothing = Site()

    def wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for ``what``, in which this rank may wait for others, as a device does. Local; raises `CommFailed`."""
        while not wait_for(is_done, _WATCH_SEC, _DEVICE_POLL_SEC):
            reason = self.comm.watch()
            if reason is not None or time.monotonic() >= self.deadline:
                raise CommFailed(reason or f"no end of {what}", is_late=True)

    def ask(self, call: Call, numbers: Sequence[float] | Failure) -> list[float]:
        """Prove that all ranks make this call, and return the sum of each number over all ranks.

        Every rank must call, with as many numbers, at most `_MOST_NUMBERS`: they find room in the smallest buffer,
        which all groups have. Ranks need have nothing in common before.
        """
        self.counters = self._uncounted
        failure = numbers if isinstance(numbers, Failure) else None
        values = array("d", () if isinstance(numbers, Failure) else numbers)
        assert len(values) <= _MOST_NUMBERS
        seal, end = self.seal(call, self._nothing), HEADER_LANES + len(values)
        self.buffer.seal(seal, failed=failure is not None)
        self.buffer.lanes[HEADER_LANES:end] = values
        if not self.sum(seal):
            self.exchange_statuses(Status(call, self._nothing.agreed, failure))
        return list(self.buffer.lanes[HEADER_LANES:end])

    # -- the one collective -------------------------------------------------------------------------------------------

    def seal(self, call: Call, site: Site) -> Seal:
        """Return what the lanes of this call hold if all ranks make it."""
        seal = site.seals.get(call)
        if seal is None:
            text = repr(call).encode("utf-8", "surrogatepass")
            seal = site.seals.keep(call, Seal.of(fingerprint(text + site.agreed), self.world_size))
        return seal

    def sum(self, seal: Seal) -> bool:
        """Add up what is in the buffer, over all ranks; whether all of them made the same call, and none is stale."""
        self.comm.all_reduce("sum", self.buffer.tensor, self.begin(self.buffer.capacity * _BYTES))
        return self.buffer.control_lanes == seal.agreed

    def begin(self, payload_bytes: int) -> float:
        """Count a collective, and return how many seconds it has. Raises `CommFailed` where the call has none left."""
        left_sec = self.deadline - time.monotonic()
        if self.world_size == 1:
            return left_sec  # plain arithmetic: nothing is sent
        if left_sec <= 0:
            raise CommFailed("the time limit of the call is over", is_late=True)
        self.collectives += 1
        self.counters["collectives"] += 1
        self.counters["payload_bytes"] += payload_bytes
        return left_sec

    # -- sites --------------------------------------------------------------------------------------------------------

    def keep(self, call: Call, site: Site) -> None:
        """Note that all ranks have this in common now; the buffer is made large enough for it."""
        self.sites[call.site] = site
        self._resize()

    def note_use(self, call: Call, site: Site) -> None:
        """Keep a site that was used just now; the one that was not used for longest is dropped where there are many."""
        self.sites[call.site] = site
        self.sites.move_to_end(call.site)
        if len(self.sites) > _MAX_SITES:
            self.sites.popitem(last=False)
            self._resize()

    def _resize(self) -> None:
        capacity = capacity_for(max((site.lanes for site in self.sites.values()), default=HEADER_LANES))
        if capacity != self.buffer.capacity:
            self.buffer = Buffer(capacity)

    # -- where the lanes were not clean -------------------------------------------------------------------------------

    def exchange_statuses(self, status: Status) -> Statuses:
        """Return every rank's status. Raises what is wrong with the call, on every rank."""
        self.counters["renegotiations"] += 1
        statuses = [(decode_status(payload), ranks) for payload, ranks in self.exchange(encode_status(status))]
        refuse_what_is_wrong(statuses, self.group_name)
        return statuses

    def exchange(self, payload: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return each distinct payload once, with the global ranks that hold it, in the order of the ranks."""
        ranks_of: dict[bytes, list[int]] = {}
        for rank, received in zip(self.comm.ranks, self.gather(payload), strict=True):
            ranks_of.setdefault(bytes(received), []).append(rank)
        return [(received, tuple(ranks)) for received, ranks in ranks_of.items()]

    def gather(self, payload: bytes | bytearray) -> list[memoryview]:
        """Return every rank's payload, of any length, in the order of ranks. Every rank must call.

        First lengths and digests of all ranks. Then, unless all hold the same, one padded all_gather; payloads that
        are much larger than the others are broadcast by their ranks, so that no rank receives padding of that size.
        """
        head = _HEAD.pack(len(payload), hashlib.blake2b(payload, digest_size=16).digest())
        heads = [bytes(received) for received in self.comm.all_gather(head, self.begin(_HEAD.size))]
        if set(heads) == {head}:
            return [memoryview(payload)] * self.world_size
        sizes = [_HEAD.unpack(received)[0] for received in heads]
        # Half of the ranks or more are padded, and to little more than the median.
        most_padded = 1.25 * median_low(sizes) + _BROADCAST_BYTES
        padded = max(size for size in sizes if size <= most_padded)
        large = [position for position, size in enumerate(sizes) if size > padded]
        received_bytes = padded * self.world_size + sum(sizes[position] for position in large)
        if received_bytes > _MAX_GATHERED_BYTES:
            largest = max(sizes)
            ranks = [rank for rank, size in zip(self.comm.ranks, sizes, strict=True) if size == largest]
            raise InvalidStats(
                f"{ranks_text(ranks)} would send {largest:,} bytes to every rank; the limit for all "
                f"{self.world_size} ranks together is {_MAX_GATHERED_BYTES:,}",
                ranks=ranks,
                group=self.group_name,
            )
        parts = [memoryview(b"")] * self.world_size
        if padded:  # of a larger payload an arbitrary part
            block = bytearray(padded)
            block[: len(payload)] = payload[:padded]
            blocks = self.comm.all_gather(block, self.begin(padded))
            parts = [memoryview(part)[:size] for part, size in zip(blocks, sizes, strict=True)]
        for position in large:
            part = bytearray(payload) if position == self.position else bytearray(sizes[position])
            self.comm.broadcast(as_byte_tensor(part), position, self.begin(sizes[position]))
            parts[position] = memoryview(part)
        for rank, expected, received in zip(self.comm.ranks, heads, parts, strict=True):
            if hashlib.blake2b(received, digest_size=16).digest() != _HEAD.unpack(expected)[1]:
                raise DamagedError(f"what {ranks_text([rank])} sent arrived damaged")
        return parts
