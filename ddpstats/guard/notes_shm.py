"""Ranks post what they are about to do: one small note per collective, and no collective for it.

Notes of one group are numbered; a rank posts its own without waiting, and looks at those of the others when it must
know. So ranks that use their groups in different order never wait for each other's posting. Two ways for a note:

* ranks of one host: a piece of shared memory, one ring of notes per rank. A note carries a check word over its content,
  so that one which is half written is not yet there, on any processor.
* otherwise, and until a rank knows that all are on one host: the store (`notes`).

The same memory holds the last few events of each rank in words (`tell`), written before they are issued: they outlive
a process that gloo aborts in the middle of one, and a neighbour that comes later sees there that it would not fit.

The piece of shared memory never has a name: the ranks open it as a file of the process that made it, so a killed
process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddpstats._ranks.failure import ProcessId
from ddpstats._ranks.store import GLANCE_SEC, StoreSilent, bounded, shared_poll
from ddpstats.guard.event import MASK, stable_hash
from ddpstats.guard.notes import NOTES_KEPT, Note, Overrun, StoreNotes

_WORDS = 6  # number, digest, balance, label, rolling, check word
_BYTES = 8
_SALT = 0xD1B54A32D192ED03
_SPINS = 2000  # and no longer than _WATCH_SEC: on a machine with much else to do each may take a time slice
_LONGEST_POLL_SEC = 0.005
_WATCH_SEC = 0.05
_POSTED = struct.Struct("@6Q")  # "@": word by word, and none by halves
_TOLD = struct.Struct("@4Q")
_NOWHERE = bytes(16)
EVENT_BYTES = 992  # of one event in words
_EVENTS_TOLD = 8  # per rank
_TOLD_WORDS = 4  # check word, number, digest, length and CRC; then the words themselves
_TOLD_BYTES = _TOLD_WORDS * _BYTES + EVENT_BYTES
_TOLD_STEP = _TOLD_BYTES // _BYTES
_MESSAGES_KEPT = 256  # per rank: a key and a digest each


def agree(notes: Sequence[Note]) -> bool:
    """Return whether ranks that posted these are about to do the same; labels apart."""
    first = notes[0]
    if any(note.digest != first.digest or note.rolling != first.rolling for note in notes):
        return False
    return sum(note.balance for note in notes) & MASK == 0


def share(name: str, index: int, size: int, note: Note) -> int:
    """Return what a rank adds to a sum over ranks that proves that all notes of a group are the same, labels included.

    Each two neighbours in the ring of places cancel out what stands for their notes, if these are equal: the sum is 0
    modulo 2**64. A difference goes unseen once in 2**64. Shares of several groups may be added up in one sum.

    Args:
        name: of the group; the same on all of its ranks, and another one for each group.
        index, size: of this rank in the group, and of the group.
    """
    told = f"{name}\0{note.digest}\0{note.rolling}\0{note.label}\0"
    return (
        stable_hash(f"{told}{index}")
        - stable_hash(f"{told}{(index - 1) % size}")
        + note.balance * (stable_hash(name) | 1)
    ) & MASK


Watch = Callable[[], None]
"""Called now and then by a rank that waits; raises to end the wait."""


class Exchange:
    """The notes of one group. ``store`` is for this group and this guard alone; ``index`` is the rank in the group."""

    def __init__(self, store: Any, index: int, size: int) -> None:
        self._store, self._index, self._size = bounded(store), index, size
        self._in_store = StoreNotes(self._store, index, size)
        self._shared: _Shared | None = None
        self._all_here = size == 1
        self._hosts_known = size == 1
        if size > 1:
            self._introduce()

    def _introduce(self) -> None:
        """Open the shared memory and say where this rank lives. Waits for nobody."""
        machine = ProcessId.mine().machine
        place = f"rank {self._index} alone"
        if machine != _NOWHERE:
            try:
                self._shared = _Shared.of(self._store, machine, self._index, self._size)
                place = machine.hex()
            except (OSError, AttributeError, ValueError):  # no memfd on this system, another user's process, or gone
                self._shared = None
        if self._store.post("place", place) != place.encode():
            self._store.set("several places", "1")
        if self._store.add("met", 1) == self._size:
            self._store.set("all met", "1")

    def _know_hosts(self) -> bool:
        """Return whether it is known by now where all ranks are."""
        if not self._hosts_known:
            if not self._store.check(["all met"]):
                return False
            are_parted = self._store.check(["several places"])  # may raise: then it is not known yet
            self._hosts_known = True
            self._all_here = self._shared is not None and not are_parted
            if self._shared is not None:
                self._shared.drop_file()
        return True

    @property
    def is_quick(self) -> bool:
        """Return whether a look costs next to nothing."""
        return self._all_here

    def post(self, seq: int, note: Note) -> None:
        """Post this rank's note; never waits."""
        if self._shared is not None:
            self._shared.write(seq, note)
        if not self._all_here:
            self._in_store.post(seq, note)

    def look(self, seq: int) -> list[Note] | None:
        """Return the notes of all ranks if all have posted; from the store each note once, and balances added up.

        Raises `Overrun` where one is gone already.
        """
        if self._all_here and self._shared is not None:
            return self._shared.read_all(seq)
        if self._size == 1 or not self._know_hosts():
            return [] if self._size == 1 else None
        if self._all_here:
            return self.look(seq)
        return self._in_store.look(seq)

    def all_alike(self, seq: int) -> bool:
        """Return True if all ranks have posted the note of this one, and no balance is open. False says nothing."""
        return self._all_here and self._shared is not None and self._shared.all_alike(seq)

    def wait(self, seq: int, watch: Watch) -> list[Note]:
        """All ranks' notes; waits until they are there, or ``watch`` raises."""
        spins, poll_sec, looked = 0, 2e-5, time.monotonic()
        longest_sec = _LONGEST_POLL_SEC if self._all_here else shared_poll(_LONGEST_POLL_SEC, self._size)
        watch_sec = shared_poll(_WATCH_SEC, self._size)
        while True:
            notes = self.look(seq) if self._all_here else self._glance(seq)
            if notes is not None:
                return notes
            spins += 1
            if spins < _SPINS and self._all_here and time.monotonic() - looked < _WATCH_SEC:
                os.sched_yield()
                continue
            time.sleep(poll_sec)
            poll_sec = min(max(poll_sec * 1.5, longest_sec / 64), longest_sec)
            if time.monotonic() - looked > watch_sec:
                watch()
                looked = time.monotonic()

    def _glance(self, seq: int) -> list[Note] | None:
        """`look` through a store that may be silent for a while: how long is for whoever waits to say."""
        try:
            with self._store.within(GLANCE_SEC):
                notes = self.look(seq)
                if notes is None:
                    self._in_store.check_overrun(seq)
                return notes
        except StoreSilent:
            return None

    def absent(self, seq: int) -> list[int]:
        """The places in the group of those whose note is not there yet."""
        if self._all_here and self._shared is not None:
            return [index for index in range(self._size) if not self._shared.has_note(index, seq)]
        return self._in_store.absent(seq)

    # -- what a rank is about to do, in words; on one host only -------------------------------------------------------

    def tell(self, seq: int, digest: int, words: Words) -> bool:
        """Say what this rank is about to issue; never waits. True if a neighbour is about to issue something else.

        If the ranks of a host are not all about to do the same, two that are neighbours in the ring of places differ,
        and the later of the two sees it. So two looks are enough for any number of ranks.
        """
        return self._shared is not None and self._shared.tell(seq, digest, words)

    def post_message(self, peer: int, key: int, digest: int) -> bool:
        """Say what message this rank begins; never waits. True if ``peer``, the other rank of it, began another one.

        ``key`` names the message on both ranks, and ``digest`` stands for what is in it.
        """
        return self._shared is not None and self._shared.post_message(peer, key, digest)

    def told_by(self, index: int) -> list[tuple[int, int, bytes]]:
        """(number, digest, words) of the last events of a rank of this host, oldest first."""
        return [] if self._shared is None else self._shared.told_by(index)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None
            self._all_here = self._size == 1


class Words(NamedTuple):
    """Bytes to tell. ``length_and_crc``: the words' length, and a CRC-32 of them."""

    payload: bytes
    length_and_crc: int

    @classmethod
    def of(cls, payload: bytes) -> Words:
        if len(payload) > EVENT_BYTES:
            raise ValueError(f"{len(payload)} bytes, where {EVENT_BYTES} have room")
        return cls(payload, len(payload) << 32 | zlib.crc32(payload))


class _Shared:
    """Shared memory for the notes of ranks of one host."""

    def __init__(self, file: int, index: int, size: int) -> None:
        """Takes over the file descriptor."""
        self._file, self._index, self._size = file, index, size
        self._map = mmap.mmap(file, self._length(size))
        self._words = memoryview(self._map).cast("Q")
        self._told_here = self._told_at(index)
        self._told: list[Words | None] = [None] * _EVENTS_TOLD  # what stands there
        self._neighbours = {self._told_at(index - 1), self._told_at(index + 1)}

    @staticmethod
    def _length(size: int) -> int:
        return size * (NOTES_KEPT * _WORDS * _BYTES + _EVENTS_TOLD * _TOLD_BYTES + _MESSAGES_KEPT * 2 * _BYTES)

    @classmethod
    def of(cls, store: Any, machine: bytes, index: int, size: int) -> _Shared:
        """The memory of this group on this machine: the first rank to come makes it, the others open it.

        Raises OSError or AttributeError where that is not possible.
        """
        name, length = f"ddpstats-{secrets.token_hex(16)}", cls._length(size)
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.fchmod(file, 0o600)
            os.ftruncate(file, length)
            mine = f"{os.getpid()} {file} {name}"
            made = store.post(f"memory/{machine.hex()}", mine).decode()
            if made != mine:
                os.close(file)
                file = -1
                file = _opened(made, length)
            return cls(file, index, size)
        except BaseException:
            if file >= 0:
                os.close(file)
            raise

    def write(self, seq: int, note: Note) -> None:
        at = (self._index * NOTES_KEPT + seq % NOTES_KEPT) * _WORDS * _BYTES
        _POSTED.pack_into(self._map, at, seq, *note, _check_word(seq, note))

    def read_all(self, seq: int) -> list[Note] | None:
        words, notes = self._words, []
        at = (seq % NOTES_KEPT) * _WORDS
        for _ in range(self._size):
            found, check = words[at], words[at + 5]
            note = Note(words[at + 1], words[at + 2], words[at + 3], words[at + 4])
            if check != _check_word(found, note) or found != seq:
                if found > seq and check != 0:
                    raise Overrun
                return None
            notes.append(note)
            at += NOTES_KEPT * _WORDS
        return notes

    def all_alike(self, seq: int) -> bool:
        size, at = _WORDS * _BYTES, seq % NOTES_KEPT * _WORDS * _BYTES
        mine = at + self._index * NOTES_KEPT * size
        note = self._map[mine : mine + size]
        if self._words[mine // _BYTES] != seq or self._words[mine // _BYTES + 2]:
            return False
        for _ in range(self._size):
            if self._map[at : at + size] != note:
                return False
            at += NOTES_KEPT * size
        return True

    def has_note(self, index: int, seq: int) -> bool:
        return self._words[(index * NOTES_KEPT + seq % NOTES_KEPT) * _WORDS] >= seq

    def _told_at(self, index: int) -> int:
        """Return where in the memory, in words, the events of a rank begin."""
        return self._size * NOTES_KEPT * _WORDS + index % self._size * _EVENTS_TOLD * _TOLD_STEP

    def tell(self, seq: int, digest: int, given: Words) -> bool:
        """Return whether one of the two neighbours has said that its event of that number is another one."""
        slot = seq % _EVENTS_TOLD
        words, at = self._words, self._told_here + slot * _TOLD_STEP
        if self._told[slot] is not given:
            words[at] = 0  # not valid while it changes
            start = (at + _TOLD_WORDS) * _BYTES
            self._map[start : start + len(given.payload)] = given.payload
            self._told[slot] = given
        length_and_crc = given.length_and_crc
        _TOLD.pack_into(self._map, at * _BYTES, seq ^ digest ^ length_and_crc ^ _SALT, seq, digest, length_and_crc)
        for place in self._neighbours:
            at = place + slot * _TOLD_STEP
            if words[at + 1] == seq and words[at + 2] != digest:
                check = seq ^ words[at + 2] ^ words[at + 3] ^ _SALT
                if words[at] == check != 0:
                    return True
        return False

    def told_by(self, index: int) -> list[tuple[int, int, bytes]]:
        found = []
        for slot in range(_EVENTS_TOLD):
            at = self._told_at(index) + slot * _TOLD_STEP
            check, seq, digest, length_and_crc = self._words[at : at + _TOLD_WORDS]
            start = (at + _TOLD_WORDS) * _BYTES
            payload = self._map[start : start + min(length_and_crc >> 32, EVENT_BYTES)]
            if check == seq ^ digest ^ length_and_crc ^ _SALT and zlib.crc32(payload) == length_and_crc & 0xFFFFFFFF:
                found.append((seq, digest, payload))
        return sorted(found)

    def post_message(self, peer: int, key: int, digest: int) -> bool:
        words, begin = self._words, self._told_at(0) + self._size * _EVENTS_TOLD * _TOLD_STEP
        at, there = (begin + (index * _MESSAGES_KEPT + key % _MESSAGES_KEPT) * 2 for index in (self._index, peer))
        words[at] = 0  # not valid while it changes
        words[at + 1] = digest
        words[at] = key
        return words[there] == key and words[there + 1] != digest and words[there] == key

    def drop_file(self) -> None:
        """Once all ranks have it open, nobody needs the descriptor. Local and idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        self.drop_file()
        self._words.release()
        self._map.close()


def _check_word(seq: int, note: Note) -> int:
    return (seq ^ note.digest ^ note.balance ^ note.label ^ note.rolling ^ _SALT) & MASK


def _opened(told: str, length: int) -> int:
    """The memory that another process told of. Raises OSError or ValueError where that is not (any more) what it was.

    The process may have closed it since, and opened a file of the user's under the same number: its name must be the
    one that was told, before it is opened for writing and after.
    """
    pid, number, name = told.split(" ")
    path = f"/proc/{int(pid)}/fd/{int(number)}"
    expected = f"/memfd:{name} (deleted)"
    if os.readlink(path) != expected:
        raise ValueError("the memory is gone")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.readlink(f"/proc/self/fd/{file}") != expected or os.fstat(file).st_size != length:
            raise ValueError("the memory is gone")
    except BaseException:
        os.close(file)
        raise
    return file
