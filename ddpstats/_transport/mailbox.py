"""One event, one verdict: what ranks tell each other through the store when no collective can be trusted.

1. `meet`: at the first use of a group every rank says that it is there, before any collective is tried.
2. `poll_verdict`: a rank that has waited for a while in a collective posts that it waits, and looks for a verdict and
   for ranks that died: on one host, a process that no longer exists is known at once.
3. `decide_verdict`: a rank whose collective failed watches who else waits. Who does not is missing. The first rank to
   reach a conclusion writes the verdict; all others, and a late one at its next call, raise that text.

The store is a helper here, never a dependency. Where it is gone or silent, each rank says what it knows alone, in words
that others who know the same would choose as well: who served the store, if nobody does any more; else whose process
on this host is gone; else which ranks are on other hosts, for it is then this one that is cut off. `board` keeps what
the first rank of a host concluded for its other ranks. Where nobody can be named, `GroupVerdict.missing` is empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ddpstats._transport import launcher
from ddpstats._transport.board import Board
from ddpstats._transport.store import STORE_ERRORS, BoundedStore, StoreGone, StoreSilent, bounded
from ddpstats.errors import ConfigError

_DYING_SEC = 1.0
_POLL_SEC = 0.05
_LOOK_SEC = 0.5  # between two looks for ranks that died before they came
_LOOKED_AT = 64  # ranks at a time, of those that have come
_GLANCE_SEC = 1.0
_LEAVE_SEC = 5.0
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
class GroupVerdict:
    """What all ranks raise. ``missing``: global ranks; empty where nobody can be named."""

    missing: tuple[int, ...]
    message: str


@dataclass
class Mailbox:
    """This rank's access to the group's store, a `BoundedStore` or one that needs no limit.

    ``peers``: the processes of the other ranks, as far as they are known. ``describe_lost`` makes the text of a verdict
    without the store, from the same as any other; it may say nothing that other ranks would say otherwise.
    ``all_started``: every rank is known to have been there at some time.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    peers: dict[int, ProcessId] = field(default_factory=dict)
    describe_lost: Describe | None = None
    all_started: bool = False

    def __post_init__(self) -> None:
        # Keys are spelled from these: plain numbers, not ranks that print their group rank as well.
        self.rank, self.ranks = int(self.rank), tuple(map(int, self.ranks))
        self.store: BoundedStore = bounded(self.store)
        self._board: Board | None = None
        self._looked, self._absent = time.monotonic(), set[int]()

    def meet(self, timeout_sec: float, slice_sec: float, describe: Describe) -> GroupVerdict | None:
        """Say that this rank is there and wait for all others; a verdict if some did not come in time, or cannot."""
        deadline = time.monotonic() + timeout_sec
        everyone = [f"here/{rank}" for rank in self.ranks]
        try:
            with self.store.within(timeout_sec + slice_sec):
                self.store.set(f"here/{self.rank}", ProcessId.mine().pack())
                for poll_sec in _growing_polls(min(slice_sec, _LOOK_SEC)):
                    if self.store.check(everyone):
                        break
                    time.sleep(poll_sec)
                    written = self.read() or self._without_the_dead(describe)
                    if written is not None:
                        return written
                    if time.monotonic() >= deadline:
                        missing = [rank for rank in self.ranks if not self.store.check([f"here/{rank}"])]
                        return self._write(missing, [], describe) if missing else None
                self._learn(self.ranks)
                token = self.store.compare_set("board", "", secrets.token_hex(16)).decode(errors="replace")
                self._board = Board(token, self._others_here()) if token.isalnum() else None
                return self.read()
        except STORE_ERRORS as error:
            return self._without_store(error, describe)

    def poll_verdict(self, seq: int, limit_sec: float = _GLANCE_SEC) -> GroupVerdict | None:
        """Post that this rank waits in its ``seq``-th collective; the verdict, if one is due or written."""
        try:
            with self.store.within(limit_sec):
                self._post_waiting(seq)
                return self.read()
        except STORE_ERRORS:  # the collective itself may still succeed; if not, `decide_verdict` reports the store
            return self._posted()

    def dead_peers(self) -> set[int]:
        """Peers of this host whose process is gone; told to the other hosts through the store."""
        dead = self._gone()
        try:
            with self.store.within(_GLANCE_SEC):
                for rank in dead:
                    self.store.set(f"dead/{rank}", "1")
        except STORE_ERRORS:
            pass
        return dead

    def decide_verdict(self, seq: int, deadline: float, describe: Describe) -> GroupVerdict:
        """The verdict on the failed ``seq``-th collective; ends at ``deadline`` (time.monotonic) at the latest."""
        try:
            with self.store.within(max(_GLANCE_SEC, deadline - time.monotonic())):
                return self._decide_verdict(seq, deadline, describe)
        except STORE_ERRORS as error:
            return self._without_store(error, describe)

    def _decide_verdict(self, seq: int, deadline: float, describe: Describe) -> GroupVerdict:
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

    def leave(self, describe: Describe) -> GroupVerdict:
        """Say that this rank is the one that others will miss."""
        try:
            with self.store.within(_LEAVE_SEC):
                return self._write([self.rank], [], describe)
        except STORE_ERRORS as error:
            return self._without_store(error, describe)

    def announce(self, message: str) -> GroupVerdict:
        """Say that this rank takes no further part. The words of the first rank that did so become the verdict."""
        mine = _spell(GroupVerdict((self.rank,), message))
        try:
            with self.store.within(_LEAVE_SEC):
                first = _parse(self.store.compare_set("announced", "", mine))
                self._write(list(first.missing), [], lambda missing, dead: first.message)
        except STORE_ERRORS:
            return GroupVerdict((self.rank,), message)
        return first

    def announced(self) -> GroupVerdict | None:
        """What the first rank said that took no further part; never waits for it, and no error without the store."""
        try:
            with self.store.within(_GLANCE_SEC):
                return _parse(self.store.get("announced")) if self.store.check(["announced"]) else None
        except STORE_ERRORS:
            return None

    def read(self) -> GroupVerdict | None:
        """The verdict, if some rank has written one; never waits for it."""
        if not self.store.check(["verdict"]):
            return None
        return self._keep(_parse(self.store.get("verdict")))

    def _write(self, missing: list[int], dead: list[int], describe: Describe) -> GroupVerdict:
        mine = GroupVerdict(tuple(missing), describe(tuple(missing), tuple(dead)))
        return self._keep(_parse(self.store.compare_set("verdict", "", _spell(mine))))

    def _keep(self, verdict: GroupVerdict) -> GroupVerdict:
        """For ranks of this host that come when the store is gone, with the rank that serves it."""
        if self._board is not None and self.store.host_rank is not None:
            self._board.post(_spell(verdict))
        return verdict

    # -- who is gone --------------------------------------------------------------------------------------------------

    def gone(self) -> set[int]:
        """Ranks of this host whose process is gone, also before they came; asks no store, and looks now and then."""
        if time.monotonic() - self._looked >= _LOOK_SEC:
            self._looked = time.monotonic()
            absent = self._never_came()
            # Twice in a row: a process is not told from the outside while it begins to run its program.
            self._absent, seen_before = absent, self._absent
            return self._gone() | (absent & seen_before)
        return self._gone()

    def _without_the_dead(self, describe: Describe) -> GroupVerdict | None:
        """While ranks meet: the verdict, if one of them cannot come any more."""
        if time.monotonic() - self._looked < _LOOK_SEC:
            return None
        unknown = [rank for rank in self.ranks if rank not in self.peers and rank != self.rank]
        self._learn([rank for rank in unknown if self.store.check([f"here/{rank}"])][:_LOOKED_AT])
        dead = sorted(self.gone())
        return self._write(dead, dead, describe) if dead else None

    def _learn(self, ranks: Iterable[int]) -> None:
        """Which processes those ranks are, all of which have come."""
        others = [rank for rank in ranks if rank != self.rank]
        if others:
            payloads = self.store.multi_get([f"here/{rank}" for rank in others])
            self.peers.update(
                (rank, ProcessId.unpack(payload))
                for rank, payload in zip(others, payloads, strict=True)
                if len(payload) == PROCESS_ID_BYTES
            )

    def _dead(self) -> list[int]:
        here = self.dead_peers()
        return [rank for rank in self.ranks if rank in here or self.store.check([f"dead/{rank}"])]

    def _gone(self) -> set[int]:
        return {rank for rank, process in self.peers.items() if process.is_dead()}

    def _never_came(self) -> set[int]:
        return launcher.ended([rank for rank in self.ranks if rank not in self.peers], self.rank, self.all_started)

    def _others_here(self) -> list[ProcessId]:
        machine = ProcessId.mine().machine
        return [process for process in self.peers.values() if process.machine == machine]

    # -- without the store --------------------------------------------------------------------------------------------

    def _posted(self) -> GroupVerdict | None:
        """What another rank of this host concluded."""
        try:
            text = None if self._board is None else self._board.read()
            return None if text is None else _parse(text)
        except ValueError:
            return None

    def _without_store(self, error: BaseException, describe: Describe) -> GroupVerdict:
        if isinstance(error, ConfigError):  # it never was one that ranks can meet in
            raise error
        missing, dead, why = self._known_alone(error)
        text = (self.describe_lost or describe)(missing, dead)
        mine = GroupVerdict(missing, f"{text}\nThe store, which could tell who is missing, does not answer: {why}")
        return self._posted() or _parse((self._board and self._board.post(_spell(mine))) or _spell(mine))

    def are_elsewhere(self, ranks: Iterable[int]) -> bool:
        """Whether those ranks are known to be on other hosts."""
        machine = ProcessId.mine().machine
        return all(rank in self.peers and self.peers[rank].machine != machine for rank in ranks)

    def _known_alone(self, error: BaseException) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """(who is missing, who of them is dead, why the store does not answer)."""
        host = self.store.host_rank
        # A process that is killed closes its connections a moment before it is gone.
        deadline = time.monotonic() + (0.0 if isinstance(error, StoreSilent) else _DYING_SEC)
        while True:
            is_gone = isinstance(error, StoreGone) or self.store.is_gone()
            dead = self._gone() | self._never_came()
            if dead or (is_gone and host is not None) or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SEC)
        if host is not None and (is_gone or host in dead):
            return (host,), (host,), "the process that served it is gone"
        why = "nobody serves it any more" if is_gone else str(error).strip().split("\n", 1)[0]
        if dead:
            return tuple(sorted(dead)), tuple(sorted(dead)), why
        if not isinstance(error, StoreSilent):
            return (), (), why
        elsewhere = sorted(rank for rank in self.peers if self.are_elsewhere([rank]))
        if not elsewhere and host is not None and host != self.rank:
            elsewhere = [host]
        return tuple(elsewhere), (), why

    def _post_waiting(self, seq: int) -> None:
        self.store.set(f"waiting/{self.rank}", str(seq))

    def _waits(self, rank: int, seq: int) -> bool:
        # A peer may wait in a later collective than the one that failed here; it did take part in this one.
        key = f"waiting/{rank}"
        return self.store.check([key]) and int(self.store.get(key)) >= seq


def _growing_polls(longest_sec: float) -> Iterator[float]:
    """Short sleeps first, long ones later. Not the store's own wait, which reports each of its timeouts on stderr."""
    poll_sec = 0.005
    while True:
        yield poll_sec
        poll_sec = min(1.5 * poll_sec, longest_sec)


def _spell(verdict: GroupVerdict) -> str:
    return json.dumps({"missing": verdict.missing, "message": verdict.message})


def _parse(payload: bytes | str) -> GroupVerdict:
    """Read a verdict from the store; raises ValueError for anything else."""
    if len(payload) > _MAX_VERDICT_BYTES:
        raise ValueError("the verdict in the store is too long to be one")
    found = json.loads(payload)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        raise ValueError("the verdict in the store is not one")
    missing = found.get("missing")
    if not isinstance(missing, list) or not all(type(rank) is int for rank in missing):
        raise ValueError("the verdict in the store names no ranks")
    return GroupVerdict(tuple(missing), found["message"])


def _machine() -> bytes:
    """16 bytes that stand for this boot of this machine, and its part of processes and network; else zeros."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        parts = os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")
        return hashlib.blake2b(boot + parts.encode(), digest_size=16).digest()
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
