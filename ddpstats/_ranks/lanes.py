"""The one buffer of a group: control lanes, then what a call of each kind adds up. Summed over ranks in one all_reduce.

::

    lane  0..7   fingerprint of the call, as four 16-bit numbers x and their squares
          8      ranks that are stale               (control: sums must equal what agreement gives, to the bit)
          9      ranks that failed to prepare
         10      ranks that are partial: some slot without a plain, finite value of the call's weight
         11      weight of the call
         12      0
         13..15  how many ranks need which room for all that they hold: nine counts, three to a lane
         16..    weighted sums | weights | codes, one lane per slot each, back to back;
                 in a gather of little: each rank's bytes, two to a lane, back to back;
                 of questions: their numbers

A sum alone does not prove that all ranks sent the same x: the sum of x and the sum of x squared do, since W ranks with
sums S1 and S2 agree exactly where S1 = W x and S2 = W x squared (the variance is zero). Both stay exact in float64 for
fewer than 2**21 ranks.

The size is the capacity of the group, the same on all ranks and for all names: a call that meets another name's call
meets a buffer of its own size, and the lanes can tell. A buffer sized from a rank's own keys would abort the process.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from functools import cached_property

import torch

STALE, FAILED, PARTIAL, WEIGHT, ROOM = 8, 9, 10, 11, 13
_CONTROL_LANES = 10
HEADER_LANES = 16
_BYTES = 8
_LANES_8_TO_15 = struct.Struct("=8d")

# Bytes that each rank sends to all where the lanes are not clean: the smallest that is enough for every rank. A sum
# cannot tell the largest of some sizes, but how many ranks need each of a few. The ninth count: more than all these.
ROOMS = tuple(kib << 10 for kib in (1, 2, 4, 16, 64, 256, 512, 1024))
_COUNT_BITS = 17  # as many ranks as a group may have


def section_lanes(ranks: int, room: int) -> int:
    """How many float64 it takes to give each of ``ranks`` ranks ``room`` bytes (an even number), two to a lane."""
    return HEADER_LANES + ranks * room // 2


def room_lanes(size: int) -> tuple[float, float, float]:
    """What a rank adds to the lanes of rooms that needs ``size`` bytes."""
    step = sum(size > room for room in ROOMS)
    lanes = [0.0, 0.0, 0.0]
    lanes[step // 3] = float(1 << _COUNT_BITS * (step % 3))
    return lanes[0], lanes[1], lanes[2]


def capacity_for(lanes: int) -> int:
    """``lanes`` rounded up by at most an eighth, so that a layout may grow a little without a new buffer."""
    step = max(64, (1 << (lanes - 1).bit_length()) // 16)
    return -(-lanes // step) * step


@dataclass(frozen=True)
class Seal:
    """What stands for "this call, this policy, this layout": what a rank sends, and what all sums are if all agree."""

    lanes: array[float]
    agreed: bytes
    status_bytes: int
    """How long the status of such a call is, apart from schema and failure."""

    @classmethod
    def of(cls, fingerprint: bytes, world_size: int, status_bytes: int) -> Seal:
        chunks = struct.unpack("<4H", fingerprint)
        lanes = array("d", [float(v) for x in chunks for v in (x, x * x)])
        agreed = array("d", [lane * world_size for lane in lanes] + [0.0, 0.0])
        return cls(lanes, agreed.tobytes(), status_bytes)

    @cached_property
    def room(self) -> tuple[float, float, float]:
        """Lanes of a rank that has no more to tell than the status."""
        return room_lanes(self.status_bytes)

    def room_with(self, more_bytes: int) -> tuple[float, float, float]:
        """Lanes of a rank that has so many bytes more to tell."""
        return room_lanes(self.status_bytes + more_bytes)


class Buffer:
    """Memory that Python writes and torch sums, without a copy between the two."""

    def __init__(self, capacity: int) -> None:
        self._raw = bytearray(capacity * _BYTES)
        self.tensor = torch.frombuffer(self._raw, dtype=torch.float64)
        self._bytes = memoryview(self._raw)
        self.lanes = self._bytes.cast("d")
        self.capacity = capacity

    def seal(
        self,
        seal: Seal,
        room: tuple[float, float, float],
        *,
        stale: bool,
        failed: bool,
        weight: float = 0.0,
    ) -> None:
        """Write the control lanes. A call that is stale or failed needs nothing else."""
        self.lanes[0:STALE] = seal.lanes
        _LANES_8_TO_15.pack_into(self._raw, STALE * _BYTES, stale, failed, 1.0, weight, 0.0, *room)

    def is_agreed(self, seal: Seal) -> bool:
        """After the sum: whether all ranks made the same call, and none is stale or failed."""
        return self._bytes[: _CONTROL_LANES * _BYTES] == seal.agreed

    def lane(self, index: int) -> float:
        return self.lanes[index]

    def room(self) -> int | None:
        """After the sum: room for what any rank holds; None where some rank needs more than there is."""
        for lane in (2, 1, 0):
            counts = int(self.lanes[ROOM + lane])
            if counts:
                step = 3 * lane + (counts.bit_length() - 1) // _COUNT_BITS
                return ROOMS[step] if step < len(ROOMS) else None
        return None

    def write_section(self, position: int, ranks: int, payload: bytearray) -> None:
        """This rank's bytes, for a gather: what all others add to them is zero, and integers in float64 are exact."""
        room = len(payload) // 2
        self.tensor[HEADER_LANES : HEADER_LANES + ranks * room].zero_()
        start = HEADER_LANES + position * room
        self.tensor[start : start + room].copy_(torch.frombuffer(payload, dtype=torch.int16))

    def sections(self, ranks: int, room: int) -> list[bytearray]:
        """Every rank's bytes, after the sum."""
        found = [bytearray(room) for _ in range(ranks)]
        lanes = self.tensor[HEADER_LANES : HEADER_LANES + ranks * room // 2]
        for section, lanes_of_rank in zip(found, lanes.view(ranks, -1), strict=True):
            torch.frombuffer(section, dtype=torch.int16).copy_(lanes_of_rank)
        return found
