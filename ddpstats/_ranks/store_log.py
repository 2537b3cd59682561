"""Notes of many ranks under one name of a store, in the order in which they came.

1. `append` counts, and writes the note under the number that it got.
2. `unread` asks for the count, and reads the notes that this reader has not read yet. So a look at which nothing is new
   is one request that writes nothing, however many ranks there are, and nobody asks for a note of each rank in turn.

A writer that dies between the two parts of 1 leaves a number without a note: it is asked for again and again, and the
notes behind it are read all the same.
"""

from __future__ import annotations

from ddpstats._ranks.store import BoundedStore


class StoreLog:
    """One reader's, and one writer's, view of the notes under ``name``."""

    def __init__(self, store: BoundedStore, name: str) -> None:
        self._store, self._name = store, name
        self._read = 0, list[str]()  # how far, but for these; one attribute, since two threads may be here

    def append(self, note: str | bytes) -> None:
        """Write a note; never waits."""
        self._store.set(f"{self._name}/{self._store.add(self._name, 1)}", note)

    def unread(self) -> list[bytes]:
        """What was written since the last time; never waits. Two threads may get the same notes."""
        read, pending = self._read
        counted = self._store.counted(self._name)
        keys = [*pending, *(f"{self._name}/{number}" for number in range(read + 1, counted + 1))]
        unwritten = self._store.absent(keys)
        written = [key for key in keys if key not in unwritten]
        notes = self._store.multi_get(written) if written else []
        self._read = counted, unwritten
        return notes
