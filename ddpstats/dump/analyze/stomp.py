"""Live tensors that share memory: two storages whose bytes overlap while both are in use.

1. A storage is live from the first to the last place of the dump where a tensor of it is seen. An entry has two places:
   what goes in, and what comes out, for in between the memory of an input may be given back and given out again.
2. Entries of modules are left out where there are others: they are written when the module has ended, and hold what
   went in long before. So are the gradients that go into a module's backward pass.
3. Two storages are told apart by their numbers, for an address is given out again when it is free.

Sharing may be meant: ``from_numpy``, ``frombuffer`` and dlpack make a second storage over the same bytes. Where it is
not, something gave memory out that was still in use, as a missing ``record_stream`` does.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ddpstats.dump.entries import DumpEntry, DumpLeaf
from ddpstats.dump.msprobe import parse_name


@dataclass
class Storage:
    """A storage of the run, and where its tensors are seen: the first and the last NAME, with the path in it."""

    number: int
    device: str
    start: int
    bytes: int
    first: int
    first_seen: str
    last: int
    last_seen: str
    streams: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + self.bytes


@dataclass(frozen=True)
class Overlap:
    """Two storages that are live at once and share bytes. ``start`` and ``bytes`` are what they share."""

    one: Storage
    other: Storage
    start: int
    bytes: int

    @property
    def across_streams(self) -> bool:
        return bool(self.one.streams ^ self.other.streams)

    def __str__(self) -> str:
        one, other = self.one, self.other
        streams = f", {_streams(one)} and {_streams(other)}" if self.across_streams else ""
        return (
            f"{one.first_seen} (storage {one.number}) and {other.first_seen} (storage {other.number}) share "
            f"{self.bytes:,} bytes on {one.device}{streams}: 0x{self.start:x} to 0x{self.start + self.bytes:x}, from "
            f"byte {self.start - one.start:,} of the one and byte {self.start - other.start:,} of the other; the one "
            f"is still in use at {one.last_seen}, the other at {other.last_seen}"
        )


class _Live:
    """The storages of one device that are in use, while time goes on: a few, of all that had these addresses."""

    def __init__(self) -> None:
        self._by_start: list[tuple[int, int, Storage]] = []  # the second tells those of one address apart
        self._by_last: list[tuple[int, int, int, Storage]] = []  # a heap
        self._by_size: list[tuple[int, int]] = []  # a heap of -bytes and last
        self._added = 0

    def add(self, storage: Storage) -> None:
        self._added += 1
        bisect.insort(self._by_start, (storage.start, self._added, storage))
        heapq.heappush(self._by_last, (storage.last, storage.start, self._added, storage))
        heapq.heappush(self._by_size, (-storage.bytes, storage.last))

    def sharing_with(self, storage: Storage) -> Iterator[Storage]:
        """Those with bytes of it; ``storage`` begins now, and what ended before is forgotten."""
        self._expire(storage.first)
        largest = -self._by_size[0][0] if self._by_size else 0
        place = bisect.bisect_left(self._by_start, (storage.end,)) - 1
        while place >= 0 and self._by_start[place][0] + largest > storage.start:
            one = self._by_start[place][2]
            if one.end > storage.start and one.number != storage.number:
                yield one
            place -= 1

    def _expire(self, now: int) -> None:
        while self._by_last and self._by_last[0][0] < now:
            _, *place, _ = heapq.heappop(self._by_last)
            del self._by_start[bisect.bisect_left(self._by_start, tuple(place))]
        while self._by_size and self._by_size[0][1] < now:
            heapq.heappop(self._by_size)


class MemoryWalk:
    """Takes the entries of one rank, in execution order."""

    def __init__(self, level: str) -> None:
        self._modules_only = level == "L0"
        self._storages: dict[tuple[int, int], Storage] = {}
        self._place = 0

    def take(self, entry: DumpEntry) -> None:
        name = parse_name(entry.name)
        if (not name.is_module or self._modules_only) and name.direction != "parameters_grad":
            if not (name.is_module and name.direction == "backward"):
                self._see(entry, entry.inputs, self._place)
            self._see(entry, entry.outputs, self._place + 1)
        self._place += 2

    def _see(self, entry: DumpEntry, leaves: Iterable[tuple[str, DumpLeaf]], place: int) -> None:
        for path, leaf in leaves:
            number, start, size = leaf.storage_id, leaf.storage_ptr, leaf.storage_bytes
            if number is None or not start or not size:
                continue
            seen = f"{entry.name} {path}"
            known = self._storages.get((number, start))
            if known is None:
                known = Storage(number, leaf.device or "", start, size, place, seen, place, seen)
                self._storages[number, start] = known
            known.last, known.last_seen, known.bytes = place, seen, max(known.bytes, size)
            if leaf.stream is not None:
                known.streams.add(leaf.stream)

    def overlaps(self) -> list[Overlap] | None:
        """Across streams first, then by where they begin to be shared; None where the dump has no places of tensors."""
        if not self._storages:
            return None
        found: list[Overlap] = []
        by_device: dict[str, _Live] = {}
        for storage in sorted(self._storages.values(), key=lambda one: one.first):
            live = by_device.setdefault(storage.device, _Live())
            for one in live.sharing_with(storage):
                shared = max(one.start, storage.start)
                pair = sorted((one, storage), key=lambda each: (each.first, each.number))
                found.append(Overlap(pair[0], pair[1], shared, min(one.end, storage.end) - shared))
            live.add(storage)
        found.sort(key=lambda each: (not each.across_streams, each.other.first))
        return found


def _streams(storage: Storage) -> str:
    numbers = ", ".join(map(str, sorted(storage.streams)))
    return f"stream {numbers}" if len(storage.streams) < 2 else f"streams {numbers}"
