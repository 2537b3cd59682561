"""How ranks tell each other what they are about to do: one small note per collective, and no collective for it.

Notes of one group are numbered; a rank posts its own without waiting, and looks at those of the others when it must
know. So ranks that use their groups in different order never wait for each other's posting. Two ways for a note:

* ranks of one host: a piece of shared memory, one ring of notes per rank. A note carries a check word over its content,
  so that one which is half written is not yet there, on any processor.
* otherwise, and until a rank knows that all are on one host: the store.

The piece of shared memory never has a name: the ranks open it as a file of the process that made it, so a killed
process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddpstats._mailbox import ProcessId

_SLOTS = 512  # notes per rank; who is further behind than that is not compared
_WORDS = 4
_BYTES = 8
_MASK = (1 << 64) - 1
_SALT = 0xD1B54A32D192ED03
_SPINS = 2000
_LONGEST_POLL_SEC = 0.005
_NOTE = struct.Struct("<QQ")
_NOWHERE = bytes(16)


class Note(NamedTuple):
    """What a rank posts: the digest, which must be equal on all ranks, and the balance; balances must add up to 0."""

    digest: int
    balance: int = 0


def agree(notes: Sequence[Note]) -> bool:
    """Whether ranks that posted these are about to do the same."""
    digest = notes[0].digest
    return all(note.digest == digest for note in notes) and sum(note.balance for note in notes) & _MASK == 0


class Overrun(Exception):
    """The note was overwritten before it was read."""


Watch = Callable[[], None]
"""Called now and then by a rank that waits; raises to end the wait."""


class Exchange:
    """The notes of one group. ``store`` is for this group and this guard alone; ``index`` is the rank in the group."""

    def __init__(self, store: Any, index: int, size: int) -> None:
        self._store, self._index, self._size = store, index, size
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
            except (OSError, AttributeError, ValueError):  # no memfd on this system, or another user's process
                self._shared = None
        self._store.set(f"host/{self._index}", place)

    def _know_hosts(self) -> bool:
        """Whether it is known by now where all ranks are."""
        if not self._hosts_known:
            keys = [f"host/{index}" for index in range(self._size)]
            if not self._store.check(keys):
                return False
            self._hosts_known = True
            self._all_here = self._shared is not None and len({self._store.get(key) for key in keys}) == 1
            if self._shared is not None:
                self._shared.drop_file()
        return True

    @property
    def is_quick(self) -> bool:
        """Whether a look costs next to nothing."""
        return self._all_here

    def post(self, seq: int, note: Note) -> None:
        """Post this rank's note; never waits."""
        if self._shared is not None:
            self._shared.write(seq, note)
        if not self._all_here:
            self._store.set(f"note/{seq}/{self._index}", _NOTE.pack(*note))

    def look(self, seq: int) -> list[Note] | None:
        """All ranks' notes if all are there. Raises `Overrun` where one is gone already."""
        if self._all_here and self._shared is not None:
            return self._shared.read_all(seq)
        if self._size == 1 or not self._know_hosts():
            return [] if self._size == 1 else None
        if self._all_here:
            return self.look(seq)
        keys = [f"note/{seq}/{index}" for index in range(self._size)]
        if not self._store.check(keys):
            return None
        notes = [Note(*_NOTE.unpack(payload)) for payload in self._store.multi_get(keys)]
        if seq > 2:  # all ranks have posted this one, so all have read the one before the last
            self._store.delete_key(f"note/{seq - 2}/{self._index}")
        return notes

    def wait(self, seq: int, watch: Watch) -> list[Note]:
        """All ranks' notes; waits until they are there, or ``watch`` raises."""
        spins, poll_sec, looked = 0, 2e-5, time.monotonic()
        while True:
            notes = self.look(seq)
            if notes is not None:
                return notes
            spins += 1
            if spins < _SPINS and self._all_here:
                os.sched_yield()
                continue
            time.sleep(poll_sec)
            poll_sec = min(poll_sec * 1.5, _LONGEST_POLL_SEC)
            if time.monotonic() - looked > 0.05:
                watch()
                looked = time.monotonic()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None
            self._all_here = self._size == 1


class _Shared:
    """Shared memory for the notes of ranks of one host."""

    def __init__(self, file: int, index: int, size: int) -> None:
        """Takes over the file descriptor."""
        self._file, self._index, self._size = file, index, size
        self._map = mmap.mmap(file, size * _SLOTS * _WORDS * _BYTES)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def of(cls, store: Any, machine: bytes, index: int, size: int) -> _Shared:
        """The memory of this group on this machine: the first rank to come makes it, the others open it.

        Raises OSError or AttributeError where that is not possible.
        """
        file = os.memfd_create("ddpstats", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size * _SLOTS * _WORDS * _BYTES)
            mine = f"{os.getpid()}/fd/{file}"
            made = store.compare_set(f"memory/{machine.hex()}", "", mine).decode()
            if made != mine:
                os.close(file)
                file = -1
                pid, _, number = made.partition("/fd/")
                file = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
            return cls(file, index, size)
        except BaseException:
            if file >= 0:
                os.close(file)
            raise

    def write(self, seq: int, note: Note) -> None:
        at = (self._index * _SLOTS + seq % _SLOTS) * _WORDS
        words = self._words
        words[at + 3] = 0  # not valid while it changes
        words[at], words[at + 1], words[at + 2] = seq, note.digest, note.balance
        words[at + 3] = (seq ^ note.digest ^ note.balance ^ _SALT) & _MASK

    def read_all(self, seq: int) -> list[Note] | None:
        words, notes = self._words, []
        at = (seq % _SLOTS) * _WORDS
        for _ in range(self._size):
            found, digest, balance, check = words[at], words[at + 1], words[at + 2], words[at + 3]
            if check != (found ^ digest ^ balance ^ _SALT) & _MASK or found != seq:
                if found > seq and check != 0:
                    raise Overrun
                return None
            notes.append(Note(digest, balance))
            at += _SLOTS * _WORDS
        return notes

    def drop_file(self) -> None:
        """Once all ranks have it open, nobody needs the descriptor. Local and idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        self.drop_file()
        self._words.release()
        self._map.close()
