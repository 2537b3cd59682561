"""Which processes the ranks of a group are, which of them are gone, and what one rank knows of that alone.

1. Each rank writes into the store which process it is (`join`), and the others of its host read it (`learn`) while
   somebody serves the store. Who is on another host is all that is known of the rest: a rank that read a note of every
   other one would ask the store for as much as there are pairs of ranks.
2. From then on a rank of this host whose process no longer exists is known at once (`dead`), without the store.
3. Where the store does not answer, a rank names whom it can (`known_alone`), and others who know the same name the
   same: who served the store, if nobody does any more; else whose process on this host is gone; else who serves it and
   does not answer, if that process can be reached; else which ranks are on other hosts, for it is then this one that is
   cut off. A process that lives and serves the store no more, as one whose launcher ended its process group, comes
   after those whose process is gone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddpstats._base.text import first_line, ranks_text
from ddpstats._ranks import launcher
from ddpstats._ranks.store import BoundedStore, StoreGone, StoreSilent
from ddpstats._ranks.store_log import StoreLog

_DYING_SEC = 1.0  # a process that is killed closes its connections a moment before it is gone
_POLL_SEC = 0.05
_UNSERVED = "nobody serves it any more"


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
        return self._can_be_seen() and _start_time(self.pid) != self.started

    def is_alive(self) -> bool:
        """True only where this host can know."""
        return self._can_be_seen() and _start_time(self.pid) == self.started

    def _can_be_seen(self) -> bool:
        return self.started != 0 and self.machine == _machine()


_PROCESS_ID = struct.Struct("<16sqq")
PROCESS_ID_BYTES = _PROCESS_ID.size


class Lost(NamedTuple):
    """What a rank knows without the store.

    ``missing``: global ranks. ``dead``: those of them that are gone for certain. ``why``: why the store does not
    answer. ``is_cut_off``: this host reaches no other one, and ``missing`` are theirs.
    """

    missing: tuple[int, ...]
    dead: tuple[int, ...]
    why: str
    is_cut_off: bool = False


class Roster:
    """The ranks of one group. ``peers``: the processes of the other ranks, as far as they are known.

    ``all_started``: every rank is known to have been there at some time.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        ranks: Iterable[int],
        peers: Mapping[int, ProcessId] | None = None,
        all_started: bool = False,
    ) -> None:
        # Keys are spelled from these: plain numbers, not ranks that print their group rank as well.
        self.store, self.rank, self.ranks = store, int(rank), tuple(map(int, ranks))
        self.peers = dict(peers or {})
        self._all_started = all_started
        self._log: StoreLog | None = None
        self._is_complete = False  # all ranks have joined, and those of this host are known

    def join(self) -> None:
        """Say which process this rank is."""
        store, here = self.store, ProcessId.mine()
        store.set(f"here/{self.rank}", here.pack())
        self._of_this_host().append(str(self.rank))
        if store.add("here", 1) >= len(self.ranks) and not self.absent():
            store.set("all here", "1")

    def _of_this_host(self) -> StoreLog:
        """Where the ranks of this host say who they are."""
        if self._log is None:
            self._log = StoreLog(self.store, f"host/{ProcessId.mine().machine.hex()}")
        return self._log

    def are_all_here(self) -> bool:
        """Whether all have joined."""
        return self._is_complete or self.store.check(["all here"])

    def absent(self) -> list[int]:
        """Who has not joined."""
        absent = self.store.absent([f"here/{rank}" for rank in self.ranks])
        return [int(key.removeprefix("here/")) for key in absent]

    def learn(self) -> None:
        """Which processes those ranks of this host are that have joined. Waits for nobody."""
        if self._is_complete or len(self.peers) == len(self.ranks) - 1:
            return
        store, is_complete = self.store, self.are_all_here()
        try:
            ranks = [int(rank) for rank in self._of_this_host().unread()]
            others = [rank for rank in ranks if rank != self.rank]
            payloads = store.multi_get([f"here/{rank}" for rank in others]) if others else []
        except BaseException:
            self._log, self._is_complete = None, False  # what was read is not known yet: from the start again
            raise
        for rank, payload in zip(others, payloads, strict=True):
            if len(payload) == PROCESS_ID_BYTES:
                self.peers[rank] = ProcessId.unpack(payload)
        self._is_complete = is_complete

    def met(self, processes: Mapping[int, ProcessId]) -> None:
        """All ranks have told which processes they are."""
        machine = ProcessId.mine().machine
        self.peers = {rank: process for rank, process in processes.items() if process.machine == machine}
        self.peers.pop(self.rank, None)
        self._is_complete = True

    def dead(self, ranks: Collection[int] | None = None) -> set[int]:
        """Peers of this host whose process is gone; asks no store. ``ranks``: only of these."""
        known = self._known().items()
        return {rank for rank, process in known if (ranks is None or rank in ranks) and process.is_dead()}

    def are_dead(self, ranks: Iterable[int]) -> bool:
        """Whether none of these, all of this host, has a process any more; asks no store."""
        known = self._known()
        return all(rank in known and known[rank].is_dead() for rank in ranks)

    def never_came(self) -> set[int]:
        """Ranks that were started on this host, ended, and have not told which process they were."""
        if self._is_complete:  # all came; who is not among the peers is on another host
            return set()
        return launcher.ended([rank for rank in self.ranks if rank not in self.peers], self.rank, self._all_started)

    def others_here(self) -> list[ProcessId]:
        """The processes of other ranks on this host."""
        machine = ProcessId.mine().machine
        return [process for process in self._known().values() if process.machine == machine]

    def elsewhere(self) -> set[int]:
        """Ranks that are known to be on other hosts."""
        machine, known = ProcessId.mine().machine, self._known()
        rest = set(self.ranks) - known.keys() - {self.rank} if self._is_complete else set()
        return rest | {rank for rank, process in known.items() if process.machine != machine}

    def _known(self) -> dict[int, ProcessId]:
        return self.peers.copy()  # another thread may be learning

    # -- without the store --------------------------------------------------------------------------------------------

    def known_alone(self, error: BaseException, ranks: Collection[int] | None = None) -> Lost:
        """What this rank knows. ``error``: how it showed that the store does not answer.

        ``ranks``: whom this rank waits for; all by default. Who served the store may be another one.
        """
        among = self.ranks if ranks is None else ranks
        host, is_silent = self.store.host_rank, isinstance(error, StoreSilent)
        began = time.monotonic()
        while True:
            is_served = False if isinstance(error, StoreGone) else self.store.is_served()
            dead = (self.dead() | self.never_came()).intersection(among)
            is_left = is_served is False and host in among and host != self.rank
            if host is not None and (host in dead or (is_left and not self._is_alive(host))):
                return Lost((host,), (host,), _UNSERVED)
            patience_sec = 0.0 if is_silent and is_served is not False else _DYING_SEC
            if (dead and not is_left) or time.monotonic() >= began + patience_sec:
                break
            time.sleep(_POLL_SEC)
        why = _UNSERVED if is_served is False else first_line(error)
        if dead:
            return Lost(tuple(sorted(dead)), tuple(sorted(dead)), why)
        if is_served is False:
            return Lost((), (), why) if host is None else Lost((host,), (host,), why)
        cut_off = self.elsewhere().intersection(among) if is_silent and is_served is None else set()
        if cut_off:
            return Lost(tuple(sorted(cut_off)), (), why, is_cut_off=True)
        return Lost((host,), (), why) if is_silent and host not in (None, self.rank) else Lost((), (), why)

    def _is_alive(self, rank: int) -> bool:
        """Whether this host sees the rank's process alive: one that serves no store may have left its process group."""
        process = ProcessId.mine() if rank == self.rank else self._known().get(rank)
        return process is not None and process.is_alive()

    def told_alone(self, lost: Lost, named: Callable[[set[int]], str] = ranks_text) -> list[str]:
        """What `known_alone` found, in lines that say nothing that other ranks would say otherwise."""
        server = {rank for rank in lost.missing if rank == self.store.host_rank}
        gone, silent = set(lost.dead), set(lost.missing).difference(lost.dead)
        lines = [f"  {named(server)}: is gone, and the store with it"] if server & gone else []
        lines += [f"  {named(gone - server)}: the process is gone"] if gone - server else []
        if lost.is_cut_off:
            lines.append(f"  this host is cut off: the store does not answer; {named(silent)} of other hosts")
        elif silent:
            lines.append(f"  {named(silent)}: serves the store, which does not answer")
        return lines or ["  who is missing cannot be told"]


def _machine() -> bytes:
    """16 bytes that stand for this boot of this machine, and its part of processes and network; else zeros."""
    return _machine_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _machine_of(mine: int) -> bytes:
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
