"""Notes of ranks of several hosts, through the store. One thread answers all ranks there, so none reads all notes.

1. Who posts what nobody has posted before writes it down; all others see that it is there. So there are as many notes
   in the store as there are different ones: one, where ranks do the same.
2. All count up. The last rank to come sums up: the different notes, and the sum of all balances.
3. The others look for that, and agree if it is one note.

Each rank says besides how far it has come, for the case that some rank is late.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ddpstats._ranks.store import BoundedStore
from ddpstats.guard.event import MASK

NOTES_KEPT = 512  # per rank; who is further behind than that is compared by a later one
_MAX_KINDS = 8  # of notes of one number; more different ones say no more
_HALF = 1 << 32  # of a balance: sums of halves do not overflow the store's counters
_NOTE = struct.Struct("<4Q")


class Note(NamedTuple):
    """A rank posts this for a collective.

    ``digest`` must be equal on all ranks, and so must ``rolling``, which stands for all that it did before: a later
    note proves the earlier ones that nobody read in time. Balances must add up to 0. ``label``: see
    `event.label_word`.
    """

    digest: int
    balance: int = 0
    label: int = 0
    rolling: int = 0


class Overrun(Exception):
    """The note was overwritten before it was read."""


class StoreNotes:
    """The notes of one group. ``index``: of this rank in it."""

    def __init__(self, store: BoundedStore, index: int, size: int) -> None:
        self._store, self._index, self._size = store, index, size
        self._own: tuple[int, list[Note]] = -1, []  # what this rank was the last to sum up

    def post(self, seq: int, note: Note) -> None:
        """Post this rank's note; never waits."""
        store, told = self._store, _spelled([note._replace(balance=int(note.balance != 0))])
        for kind in range(_MAX_KINDS):
            if store.post(f"note/{seq}/{kind}", told) == told.encode():
                break
        if note.balance:
            store.add(f"balance/{seq}/low", note.balance % _HALF)
            store.add(f"balance/{seq}/high", note.balance // _HALF)
        store.set(f"at/{self._index}", str(seq))
        if store.add(f"posted/{seq}", 1) == self._size:
            self._own = seq, self._summed_up(seq, kind, told.encode())
            store.set(f"all/{seq}", _spelled(self._own[1]))
            self._forget(seq - NOTES_KEPT)

    def _summed_up(self, seq: int, own_kind: int, own: bytes) -> list[Note]:
        notes, balance = list[Note](), 0
        for kind in range(_MAX_KINDS):
            told = own if kind == own_kind else self._store.find(f"note/{seq}/{kind}")
            if told is None:
                break
            notes += _notes_of(told) or ()
        if any(note.balance for note in notes):
            low, high = (self._store.counted(f"balance/{seq}/{half}") for half in ("low", "high"))
            balance = (low + high * _HALF) & MASK
        return [note._replace(balance=0 if kind else balance) for kind, note in enumerate(notes)]

    def _forget(self, seq: int) -> None:
        """Of a number on which ranks differed the other notes stay: there is no next one."""
        if seq > 0:
            for key in ("note/{}/0", "all/{}", "posted/{}", "balance/{}/low", "balance/{}/high"):
                self._store.delete_key(key.format(seq))

    def look(self, seq: int) -> list[Note] | None:
        """The different notes if all ranks have posted, the first with the sum of all balances; else None."""
        if seq == self._own[0]:
            return self._own[1]
        told = self._store.find(f"all/{seq}")
        return None if told is None else _notes_of(told)

    def check_overrun(self, seq: int) -> None:
        """Raise `Overrun` if the notes were deleted already: all ranks have posted much later ones since."""
        if self._store.check([f"all/{seq + NOTES_KEPT}"]) and not self._store.check([f"all/{seq}"]):
            raise Overrun

    def absent(self, seq: int) -> list[int]:
        """The places in the group of those that have not come so far."""
        keys = {f"at/{index}": index for index in range(self._size)}
        absent = {keys.pop(key) for key in self._store.absent(list(keys))}
        told = self._store.multi_get(list(keys)) if keys else []
        absent.update(index for index, at in zip(keys.values(), told, strict=True) if int(at) < seq)
        return sorted(absent)


def _spelled(notes: Sequence[Note]) -> str:
    return b"".join(_NOTE.pack(*note) for note in notes).hex()


def _notes_of(told: bytes) -> list[Note] | None:
    """None for what is not one of ours."""
    try:
        return [Note(*note) for note in _NOTE.iter_unpack(bytes.fromhex(told.decode()))] or None
    except (ValueError, struct.error):
        return None
