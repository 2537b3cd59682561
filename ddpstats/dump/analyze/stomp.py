"""Live tensors that share memory: two storages whose bytes overlap while both are in use.

1. A storage is live from the first to the last moment at which a tensor of it is seen. One entry has several: the
   memory of what goes in may be given out again before anything comes out, and that of one gradient of a backward
   entry before the next one comes.
2. Storages are identified by their numbers, for an address is given out again when it is free.

Sharing may be meant: ``from_numpy``, ``frombuffer`` and dlpack make a second storage over the same bytes. Where it is
not, something gave memory out that was still in use, as a missing ``record_stream`` does.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field

from ddpstats.dump.analyze import DumpEntry


@dataclass(eq=False)
class Storage:
    """A storage of the run, and the first and the last moment at which a tensor of it is seen: NAME and path."""

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
    """A pair of storages that are live at once and share bytes; ``first`` was there before ``second``."""

    first: Storage
    second: Storage

    @property
    def across_streams(self) -> bool:
        return bool(self.first.streams ^ self.second.streams)

    def __str__(self) -> str:
        first, second = self.first, self.second
        start, end = max(first.start, second.start), min(first.end, second.end)
        streams = f", {_streams(first)} and {_streams(second)}" if self.across_streams else ""
        return (
            f"{first.first_seen} (storage {first.number}) and {second.first_seen} (storage {second.number}) share "
            f"{end - start:,} bytes on {first.device}{streams}: 0x{start:x} to 0x{end:x}, from byte "
            f"{start - first.start:,} of the one and byte {start - second.start:,} of the other; the one is still in "
            f"use at {first.last_seen}, the other at {second.last_seen}"
        )


class MemoryWalk:
    """Takes the entries of one rank, and finds the storages that overlap.

    Attributes:
        unknown: what is needed for it, and the dump does not say; empty where it does.
    """

    def __init__(self) -> None:
        self.unknown = "where tensors are in memory"
        self._storages: dict[tuple[int, int], Storage] = {}

    def take(self, entry: DumpEntry) -> None:
        for path, leaf in (*entry.inputs, *entry.outputs):
            number, start, size, moment = leaf.storage_id, leaf.storage_ptr, leaf.storage_bytes, leaf.moment
            if number is None or not start or not size:
                continue
            if moment is None:
                self.unknown = self.unknown and "when tensors were in memory (dumped by an older ddpstats)"
                continue
            self.unknown = ""
            seen = f"{entry.name} {path}"
            storage = self._storages.get((number, start))
            if storage is None:
                storage = Storage(number, leaf.device or "", start, size, moment, seen, moment, seen)
                self._storages[number, start] = storage
            storage.bytes = max(storage.bytes, size)
            if moment < storage.first:
                storage.first, storage.first_seen = moment, seen
            if moment >= storage.last:
                storage.last, storage.last_seen = moment, seen
            if leaf.stream is not None:
                storage.streams.add(leaf.stream)

    def overlaps(self) -> list[Overlap]:
        """Return those across streams first, then by time."""
        events: list[tuple[int, bool, Storage]] = []
        for storage in self._storages.values():
            events += [(storage.first, False, storage), (storage.last, True, storage)]
        overlaps: list[Overlap] = []
        # by device and size, for a large one overlaps with what begins far behind its beginning; inside, by address
        live: defaultdict[tuple[str, int], list[tuple[int, int, Storage]]] = defaultdict(list)
        for _, is_end, storage in sorted(events, key=lambda event: (*event[:2], event[2].number)):
            near, key = live[storage.device, storage.bytes.bit_length()], (storage.start, storage.number)
            if is_end:
                del near[bisect.bisect_left(near, key)]
                continue
            for (device, size_bits), rows in live.items():
                index = bisect.bisect_left(rows, (storage.end,)) - 1
                while index >= 0 and device == storage.device and rows[index][0] + 2**size_bits > storage.start:
                    earlier = rows[index][2]
                    if earlier.end > storage.start and earlier.number != storage.number:
                        overlaps.append(Overlap(earlier, storage))
                    index -= 1
            bisect.insort(near, (*key, storage))
        return sorted(overlaps, key=lambda overlap: (not overlap.across_streams, overlap.second.first))


def _streams(storage: Storage) -> str:
    numbers = ", ".join(map(str, sorted(storage.streams)))
    return f"stream {numbers}" if len(storage.streams) < 2 else f"streams {numbers}"
