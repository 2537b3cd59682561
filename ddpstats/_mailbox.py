"""One event, one verdict: what ranks tell each other through the store when no collective can be trusted.

1. `meet`: at the first use of a group every rank says that it is there, before any collective is tried.
2. `glance`: a rank that has waited for a while in a collective posts that it waits, and looks for a verdict and for
   ranks that died: on one host, a process that no longer exists is known at once.
3. `settle`: a rank whose collective failed watches who else waits. Who does not is missing. The first rank to reach a
   conclusion writes the verdict; all others, and a late one at its next call, raise that text.

The store is a helper here, never a dependency: where it is gone too, `Verdict.missing` is empty and the text says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_POLL_SEC = 0.05
_MAX_VERDICT_BYTES = 1 << 20

Describe = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""Makes the text of a verdict from (missing ranks, those of them known to be dead)."""


@dataclass(frozen=True)
class ProcessId:
    """A process, recognisable by other processes of the same machine and pid namespace."""

    machine: bytes
    pid: int
    started: int

    @classmethod
    def mine(cls) -> ProcessId:
        return cls(_machine(), os.getpid(), _start_time(os.getpid()) or 0)

    def pack(self) -> bytes:
        return _PROCESS_ID.pack(self.machine, self.pid, self.started)

    @classmethod
    def unpack(cls, payload: bytes) -> ProcessId:
        return cls(*_PROCESS_ID.unpack(payload))

    def is_dead(self) -> bool:
        """True only where this host can know: same machine, and the process is gone or a zombie."""
        if self.started == 0 or self.machine != _machine():
            return False
        return _start_time(self.pid) != self.started


_PROCESS_ID = struct.Struct("<16sqq")
PROCESS_ID_BYTES = _PROCESS_ID.size


@dataclass(frozen=True)
class Verdict:
    """What all ranks raise. ``missing``: global ranks; empty where nobody can be named."""

    missing: tuple[int, ...]
    message: str


@dataclass
class Mailbox:
    """This rank's access to the group's store. ``peers`` is filled in once the ranks have shaken hands."""

    store: Any
    rank: int
    ranks: tuple[int, ...]
    peers: Mapping[int, ProcessId] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Keys are spelled from these: plain numbers, not ranks that print their group rank as well.
        self.rank, self.ranks = int(self.rank), tuple(map(int, self.ranks))

    def meet(self, timeout_sec: float, slice_sec: float, describe: Describe) -> Verdict | None:
        """Say that this rank is there and wait for all others; a verdict if some did not come in time."""
        deadline = time.monotonic() + timeout_sec
        try:
            self.store.set(f"here/{self.rank}", "1")
            everyone = [f"here/{rank}" for rank in self.ranks]
            for poll_sec in _growing_polls(slice_sec):
                if self.store.check(everyone):
                    break
                time.sleep(poll_sec)
                written = self.read()
                if written is not None:
                    return written
                if time.monotonic() >= deadline:
                    missing = [rank for rank in self.ranks if not self.store.check([f"here/{rank}"])]
                    return self._write(missing, [], describe) if missing else None
        except _STORE_ERRORS as error:
            return _without_store(error, describe)
        return self.read()

    def glance(self, seq: int) -> Verdict | None:
        """Post that this rank waits in its ``seq``-th collective; the verdict, if one is due or written."""
        try:
            self._post_waiting(seq)
            return self.read()
        except _STORE_ERRORS:
            return None  # the collective itself may still succeed; if not, `settle` reports the store

    def dead_peers(self) -> set[int]:
        """Peers of this host whose process is gone; told to the other hosts through the store."""
        dead = {rank for rank, process in self.peers.items() if process.is_dead()}
        for rank in dead:
            try:
                self.store.set(f"dead/{rank}", "1")
            except _STORE_ERRORS:
                break
        return dead

    def settle(self, seq: int, deadline: float, describe: Describe) -> Verdict:
        """The verdict on the failed ``seq``-th collective; ends at ``deadline`` (time.monotonic) at the latest."""
        try:
            self._post_waiting(seq)
            while True:
                written = self.read()
                if written is not None:
                    return written
                dead = self._dead()
                if dead:  # certain, so no need to wait for ranks that are merely slow
                    time.sleep(_POLL_SEC)  # ranks of one host tend to die together
                    dead = self._dead()
                    return self._write(dead, dead, describe)
                missing = [rank for rank in self.ranks if not self._waits(rank, seq)]
                if not missing or time.monotonic() >= deadline:
                    return self._write(missing, [], describe)
                time.sleep(_POLL_SEC)
        except _STORE_ERRORS as error:
            return _without_store(error, describe, (rank for rank in self.ranks if self._is_gone(rank)))

    def leave(self, describe: Describe) -> Verdict:
        """Say that this rank is the one that others will miss."""
        try:
            return self._write([self.rank], [], describe)
        except _STORE_ERRORS as error:
            return _without_store(error, describe)

    def announce(self, message: str) -> Verdict:
        """Say that this rank takes no further part. The words of the first rank that did so become the verdict."""
        mine = json.dumps({"missing": [self.rank], "message": message})
        try:
            first = _parse(self.store.compare_set("announced", "", mine))
            self._write(list(first.missing), [], lambda missing, dead: first.message)
        except _STORE_ERRORS as error:
            return _without_store(error, lambda missing, dead: message)
        return first

    def announced(self) -> Verdict | None:
        """What the first rank said that took no further part; never waits for it, and no error without the store."""
        try:
            return _parse(self.store.get("announced")) if self.store.check(["announced"]) else None
        except _STORE_ERRORS:
            return None

    def read(self) -> Verdict | None:
        """The verdict, if some rank has written one; never waits for it."""
        if not self.store.check(["verdict"]):
            return None
        return _parse(self.store.get("verdict"))

    def _write(self, missing: list[int], dead: list[int], describe: Describe) -> Verdict:
        mine = json.dumps({"missing": missing, "message": describe(tuple(missing), tuple(dead))})
        return _parse(self.store.compare_set("verdict", "", mine))

    def _dead(self) -> list[int]:
        here = self.dead_peers()
        return [rank for rank in self.ranks if rank in here or self.store.check([f"dead/{rank}"])]

    def _is_gone(self, rank: int) -> bool:
        return rank in self.peers and self.peers[rank].is_dead()

    def _post_waiting(self, seq: int) -> None:
        self.store.set(f"waiting/{self.rank}", str(seq))

    def _waits(self, rank: int, seq: int) -> bool:
        # A peer may wait in a later collective than the one that failed here; it did take part in this one.
        key = f"waiting/{rank}"
        return bool(self.store.check([key])) and int(self.store.get(key)) >= seq


def _growing_polls(longest_sec: float) -> Iterator[float]:
    """Short sleeps first, long ones later. Not the store's own wait, which reports each of its timeouts on stderr."""
    poll_sec = 0.005
    while True:
        yield poll_sec
        poll_sec = min(1.5 * poll_sec, longest_sec)


_STORE_ERRORS = (RuntimeError, OSError, ValueError)


def _without_store(error: BaseException, describe: Describe, gone: Iterable[int] = ()) -> Verdict:
    """``gone``: ranks of this host whose process is known to be dead, for the text: other hosts cannot know them."""
    reason = str(error).strip().split("\n", 1)[0]
    text = describe((), tuple(gone))
    return Verdict((), f"{text}\nThe store, which could tell who is missing, does not answer: {reason}")


def _parse(payload: bytes | str) -> Verdict:
    """Read a verdict from the store; raises ValueError for anything else."""
    if len(payload) > _MAX_VERDICT_BYTES:
        raise ValueError("the verdict in the store is too long to be one")
    found = json.loads(payload)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        raise ValueError("the verdict in the store is not one")
    missing = found.get("missing")
    if not isinstance(missing, list) or not all(type(rank) is int for rank in missing):
        raise ValueError("the verdict in the store names no ranks")
    return Verdict(tuple(missing), found["message"])


def _machine() -> bytes:
    """16 bytes that stand for this boot of this machine and this pid namespace; zeros where that cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        return hashlib.blake2b(boot + os.readlink("/proc/self/ns/pid").encode(), digest_size=16).digest()
    except OSError:
        return bytes(16)


def _start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
