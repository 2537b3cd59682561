"""Notes: what a rank is about to do, in three numbers. How ranks of several hosts exchange them through the store.

One thread answers all ranks there, so none reads all notes.

1. A rank posts its note where no rank has posted that one before; otherwise it sees that it is there. So there are as
   many notes in the store as there are different ones: one, where ranks do the same.
2. All count up. The last rank to come writes down the different notes, and the sum of all balances.
3. The others look for that, and agree if it is one note.

Each rank says besides how far it has come, for the case that some rank is late.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from ddpstats._base.files import parse_json
from ddpstats._ranks.store import BoundedStore
from ddpstats.guard.event import MASK, stable_hash

NOTES_KEPT = 512  # per rank; a rank that is further behind than that is compared by a later one
_MAX_KINDS = 8  # of notes of one number; more different ones say no more
_BALANCES = 1 << 48  # balances are added up modulo this: the store's counters do not overflow


class Note(NamedTuple):
    """A rank posts this for a collective.

    ``digest`` must be equal on all ranks. It covers all that the rank did so far: a later note proves the earlier
    ones that were not read in time. Balances must add up to 0. ``label``: see `event.label_word`.
    """

    digest: int
    balance: int = 0
    label: int = 0


class Overrun(Exception):
    """The note was overwritten before it was read."""


def agree(notes: Sequence[Note]) -> bool:
    """Return whether ranks that posted these are about to do the same, whatever their labels are."""
    first = notes[0].digest
    return all(note.digest == first for note in notes) and sum(note.balance for note in notes) & MASK == 0


def share(name: str, index: int, size: int, note: Note) -> int:
    """Return what a rank adds to a sum over ranks that proves that all notes of a group are the same, labels included.

    Each two neighbours in the ring of ranks cancel out the hashes of their notes, if these are equal: the sum is 0
    modulo 2**64, and so modulo any smaller power of 2. Shares of several groups may be added up in one sum.

    Args:
        name: of the group; the same on all of its ranks, and another one for each group.
        index, size: of this rank in the group, and of the group.
    """
    held = f"{name}\0{note.digest}\0{note.label}\0"
    own, neighbour = stable_hash(f"{held}{index}"), stable_hash(f"{held}{(index - 1) % size}")
    return (own - neighbour + note.balance * (stable_hash(name) | 1)) & MASK


class StoreNotes:
    """The notes of one group. ``index``: of this rank in it."""

    def __init__(self, store: BoundedStore, index: int, size: int) -> None:
        self._store, self._index, self._size, self._posted = store, index, size, 0

    def post(self, seq: int, note: Note) -> None:
        """Post this rank's note; never waits."""
        store, own = self._store, json.dumps([note.digest, note.label])
        self._posted = seq
        for kind in range(_MAX_KINDS):
            if store.post(f"note/{seq}/{kind}", own) == own.encode():
                break
        if note.balance:
            store.add(f"balance/{seq}", note.balance % _BALANCES)
        store.set(f"at/{self._index}", str(seq))
        if store.add(f"posted/{seq}", 1) == self._size:
            self._sum_up(seq)

    def _sum_up(self, seq: int) -> None:
        """Write down the different notes and the sum of all balances, and delete the notes and old keys."""
        store, notes = self._store, list[str]()
        while len(notes) < _MAX_KINDS and (note := store.find(f"note/{seq}/{len(notes)}")) is not None:
            notes.append(note.decode())
        balance = store.counted(f"balance/{seq}") % _BALANCES
        store.set(f"all/{seq}", f"[{balance}, {', '.join(notes)}]")
        old = seq - NOTES_KEPT
        outdated = [f"all/{old}", f"posted/{old}", f"balance/{old}"] if old > 0 else []
        for key in (*(f"note/{seq}/{kind}" for kind in range(len(notes))), *outdated):
            store.delete_key(key)

    def look(self, seq: int) -> list[Note] | None:
        """Return the different notes if all ranks have posted, the first with the sum of all balances; otherwise None.

        Raises `Overrun` where they were deleted already: all ranks have posted much later ones since.
        """
        summary = self._store.find(f"all/{seq}")
        if summary is None:
            later = range(seq + NOTES_KEPT, self._posted + 1, NOTES_KEPT)  # each of these deletes the one before it
            if any(self._store.check([f"all/{number}"]) for number in later):
                raise Overrun
            return None
        try:
            balance, *notes = parse_json(summary)
            return [
                Note(int(digest), 0 if kind else int(balance), int(label)) for kind, (digest, label) in enumerate(notes)
            ] or None
        except (ValueError, TypeError):  # foreign bytes
            return None

    def absent(self, seq: int) -> list[int]:
        """Return the indices of the ranks that have not come so far."""
        keys = {f"at/{index}": index for index in range(self._size)}
        present = {keys[key]: int(at) for key, at in self._store.read_present(list(keys)).items()}
        return [index for index in range(self._size) if present.get(index, -1) < seq]
