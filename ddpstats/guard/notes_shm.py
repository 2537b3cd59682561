"""Ranks post what they are about to do: one small note per collective, and no collective for it.

Notes of one group are numbered; a rank posts its own without waiting, and looks at those of the others when it must
know. So ranks that use their groups in different order never wait for each other's posting. Two ways for a note:

* ranks of one host: a piece of shared memory, one ring of notes per rank. A note carries a check word over its content,
  so that one which is half written is not yet there, on any processor.
* otherwise, and until a rank knows that all are on one host: the store (`notes`).

The same memory holds the last few events of each rank, and a digest of its last messages (`announce`), written before
they are issued. They outlive a process that gloo aborts in the middle of one, and a neighbour that comes later sees
there that it would not fit.

The piece of shared memory never has a name: the ranks open it as a file of the process that made it, so a killed
process leaves nothing behind.
"""

from __future__ import annotations

import io
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ddpstats._ranks.failure import ProcessId
from ddpstats._ranks.store import GLANCE_SEC, StoreSilent, bounded, shared_poll
from ddpstats.guard.event import EVENT_BYTES, MASK
from ddpstats.guard.notes import NOTES_KEPT, Note, Overrun, StoreNotes

_SALT = 0xD1B54A32D192ED03
_SPIN_SEC = 0.005
_LONGEST_POLL_SEC = 0.005
_WATCH_SEC = 0.05
_NOWHERE = bytes(16)

# What a rank has in the shared memory, in words of 8 bytes: its notes, its last events, its last messages.
_WORD_BYTES = 8
_NOTE = struct.Struct("@5Q")  # number, digest, balance, label, check word. "@": word by word, and none by halves
_NOTE_WORDS = _NOTE.size // _WORD_BYTES
_EVENTS_KEPT = 8
_HEAD_WORDS = 2  # of an event or a message: number, digest
_EVENT_WORDS = _HEAD_WORDS + EVENT_BYTES // _WORD_BYTES + 1  # then the event, up to a zero byte
_MESSAGES_KEPT = 256
_EVENTS_AT = NOTES_KEPT * _NOTE_WORDS
_MESSAGES_AT = _EVENTS_AT + _EVENTS_KEPT * _EVENT_WORDS
_RANK_WORDS = _MESSAGES_AT + _MESSAGES_KEPT * _HEAD_WORDS
_RANK_BYTES = _RANK_WORDS * _WORD_BYTES


class Exchange:
    """The notes of one group. ``store`` is for this group and this guard alone; ``index`` is the rank in the group.

    ``is_quick``: all ranks are known to be on this host, so that a look costs next to nothing.
    """

    def __init__(self, store: Any, index: int, size: int) -> None:
        """Open the shared memory, and say where this rank lives. Waits for no other rank."""
        self.store, self._index, self._size = bounded(store), index, size
        self._in_store = StoreNotes(self.store, index, size)
        self._shared: _SharedMemory | None = None
        self.is_quick = self._are_hosts_known = False
        machine = ProcessId.mine().machine
        self._mapped = f"mapped/{machine.hex()}"
        with suppress(OSError, AttributeError, ValueError):  # no memfd on this system, another user's process, or gone
            if machine != _NOWHERE:
                self._shared = _SharedMemory.of(self.store, machine, index, size)
                self.store.add(self._mapped, 1)
        self.store.add("met", 1)

    def _learn_hosts(self) -> None:
        """Find out where all ranks are, once all have come."""
        if not self._are_hosts_known and self.store.counted("met") == self._size:
            self.is_quick = self.shares_memory()
            self._are_hosts_known = True
            if self._shared is not None:
                self._shared.file.close()  # not needed once all ranks have it open

    def shares_memory(self) -> bool:
        """Return whether this rank shares memory with all ranks that have come so far."""
        return self._shared is not None and self.store.counted(self._mapped) == self.store.counted("met")

    def post(self, seq: int, note: Note) -> None:
        """Post this rank's note; never waits."""
        if self._shared is not None:
            self._shared.write(seq, note)
        if not self.is_quick:
            self._learn_hosts()
        if not self.is_quick:
            self._in_store.post(seq, note)

    def look(self, seq: int, spins: bool = False) -> list[Note] | None:
        """Return the notes of all ranks if all have posted; from the store each note once, and balances added up.

        None, too, where the store is silent. Raises `Overrun` where a note is gone already. ``spins``: look again and
        again for a moment, where that costs next to nothing: mostly the others are about to come.
        """
        if not self.is_quick:
            with suppress(StoreSilent), self.store.within(GLANCE_SEC):
                self._learn_hosts()
                if not self.is_quick:
                    return self._in_store.look(seq)
        shared, until = self._shared, time.monotonic() + _SPIN_SEC
        if shared is None or not self.is_quick:
            return None
        while (notes := shared.read_all(seq)) is None and spins and time.monotonic() < until:
            os.sched_yield()
        return notes

    def wait(self, seq: int, watch: Callable[[], None]) -> list[Note]:
        """Return all ranks' notes; waits until they are there, or ``watch`` raises."""
        poll_sec, looked = 2e-5, time.monotonic()
        longest_sec = _LONGEST_POLL_SEC if self.is_quick else shared_poll(_LONGEST_POLL_SEC, self._size)
        watch_sec = shared_poll(_WATCH_SEC, self._size)
        while True:
            notes = self.look(seq)
            if notes is not None:
                return notes
            time.sleep(poll_sec)
            poll_sec = min(max(poll_sec * 1.5, longest_sec / 64), longest_sec)
            if time.monotonic() - looked > watch_sec:
                watch()
                looked = time.monotonic()

    def absent(self, seq: int) -> list[int]:
        """Return the indices in the group of the ranks whose note is not there yet."""
        self._learn_hosts()  # ranks that know them post into the memory alone
        if self.is_quick and self._shared is not None:
            return self._shared.absent(seq)
        return self._in_store.absent(seq)

    # -- what a rank is about to do, for the ranks of its host --------------------------------------------------------

    def announce(self, seq: int, digest: int, encoded: bytes) -> bool:
        """Say what this rank is about to issue; never waits. True if a neighbour is about to issue another one.

        If the ranks of a host are not all about to do the same, two that are neighbours in the ring of ranks differ,
        and the later of the two sees it. So two looks are enough for any number of ranks.
        """
        slot = _EVENTS_AT + seq % _EVENTS_KEPT * _EVENT_WORDS
        return self._shared is not None and self._shared.announce(slot, seq, digest, self._shared.neighbours, encoded)

    def announce_message(self, peer: int, key: int, digest: int) -> bool:
        """Say what message this rank begins; never waits. True if ``peer``, the other rank of it, began another one.

        ``key`` names the message on both ranks, and ``digest`` is a hash of what is in it.
        """
        slot = _MESSAGES_AT + key % _MESSAGES_KEPT * _HEAD_WORDS
        return self._shared is not None and self._shared.announce(slot, key, digest, (peer,))

    def read_announced(self, index: int) -> list[tuple[int, int, bytes]]:
        """Return (number, digest, encoded) of the last events of a rank of this host, oldest first."""
        return [] if self._shared is None else self._shared.read_announced(index)

    def close(self) -> None:
        """Local and idempotent."""
        if self._shared is not None:
            self._shared.close()
            self._shared, self.is_quick = None, False


class _SharedMemory:
    """Shared memory of the ranks of one host."""

    def __init__(self, file: io.FileIO, index: int, size: int) -> None:
        self.file, self._index, self._size = file, index, size
        self._map = mmap.mmap(file.fileno(), size * _RANK_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._encoded: dict[int, bytes] = {}  # of this rank's events, by slot
        self._posted: tuple[int, list[Note]] = 0, []  # this rank's last note, once for each rank
        self.neighbours = {(index - 1) % size, (index + 1) % size}

    @classmethod
    def of(cls, store: Any, machine: bytes, index: int, size: int) -> _SharedMemory:
        """Return the memory of this group on this machine: the first rank to come makes it, the others open it.

        Raises OSError, ValueError or AttributeError where that is not possible.
        """
        name = f"ddpstats-{secrets.token_hex(16)}"
        file = io.FileIO(os.memfd_create(name, os.MFD_CLOEXEC), "r+")
        try:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size * _RANK_BYTES)
            own = f"{os.getpid()} {file.fileno()} {name}"
            known = store.post(f"memory/{machine.hex()}", own).decode()
            if known != own:
                file.close()
                file = _open(known)
            return cls(file, index, size)
        except BaseException:
            file.close()
            raise

    def write(self, seq: int, note: Note) -> None:
        at = (self._index * _RANK_WORDS + seq % NOTES_KEPT * _NOTE_WORDS) * _WORD_BYTES
        _NOTE.pack_into(self._map, at, seq, *note, _check_word(seq, note))
        self._posted = seq, [note] * self._size

    def read_all(self, seq: int) -> list[Note] | None:
        """Return the notes of all ranks; None where one is missing. Raises `Overrun`."""
        begin = seq % NOTES_KEPT * _NOTE.size
        slots = list[bytes]()
        for at in range(begin, self._size * _RANK_BYTES, _RANK_BYTES):
            if self._words[at // _WORD_BYTES] < seq:
                return None
            slots.append(self._map[at : at + _NOTE.size])
        posted_seq, own_notes = self._posted  # read once: another thread may post
        if posted_seq == seq and slots.count(slots[0]) == self._size:  # mostly: all ranks' notes are like its own
            return own_notes
        notes = [note for slot in slots if (note := _read(slot, seq)) is not None]
        return notes if len(notes) == self._size else None

    def absent(self, seq: int) -> list[int]:
        at = seq % NOTES_KEPT * _NOTE_WORDS
        return [index for index in range(self._size) if self._words[index * _RANK_WORDS + at] < seq]

    def announce(self, slot: int, number: int, digest: int, others: Collection[int], encoded: bytes = b"") -> bool:
        """Write into this rank's slot. Return whether another one has another digest under that number in its own."""
        words, at = self._words, self._index * _RANK_WORDS + slot
        words[at] = 0  # not valid while it changes
        words[at + 1] = digest
        if encoded and self._encoded.get(slot) is not encoded:
            start = (at + _HEAD_WORDS) * _WORD_BYTES
            self._map[start : start + len(encoded) + 1] = encoded + b"\0"
            self._encoded[slot] = encoded
        words[at] = number
        for index in others:
            at = index * _RANK_WORDS + slot
            if words[at] == number and words[at + 1] != digest and words[at] == number:
                return True
        return False

    def read_announced(self, index: int) -> list[tuple[int, int, bytes]]:
        events = []
        for slot in range(_EVENTS_AT, _MESSAGES_AT, _EVENT_WORDS):
            at = index * _RANK_WORDS + slot
            start = (at + _HEAD_WORDS) * _WORD_BYTES
            seq, digest = self._words[at : at + _HEAD_WORDS]
            if seq:
                events.append((seq, digest, self._map[start : start + EVENT_BYTES].partition(b"\0")[0]))
        return sorted(events)

    def close(self) -> None:
        self.file.close()
        self._words.release()
        self._map.close()


def _check_word(seq: int, note: Note) -> int:
    return (seq ^ note.digest ^ note.balance ^ note.label ^ _SALT) & MASK


def _read(slot: bytes, seq: int) -> Note | None:
    """Return the note in a slot; None if it is not there, or not whole. Raises `Overrun`."""
    number, digest, balance, label, check = _NOTE.unpack(slot)
    note = Note(digest, balance, label)
    if number < seq or check != _check_word(number, note):
        return None
    if number > seq:
        raise Overrun
    return note


def _open(known: str) -> io.FileIO:
    """Open the memory that another process has made. Raises OSError or ValueError where it is gone.

    The process may have closed it since, and opened a file of the user's under the same number.
    """
    pid, number, name = known.split(" ")
    file = io.FileIO(os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK), "r+")
    if os.readlink(f"/proc/self/fd/{file.fileno()}") != f"/memfd:{name} (deleted)":
        file.close()
        raise ValueError("the memory is gone")
    return file
