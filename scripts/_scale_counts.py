"""What the protocol costs a rank: ranks are threads, and every collective and every request to the store is counted.

The code that runs is the real one (`ddpstats._agreement`, `_transport`, `guard`); only the wire and the store are in
memory. So the counts are exact, and the seconds mean nothing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._transport.roster import ProcessId, Roster
from ddpstats._transport.store import BoundedStore, bounded
from ddpstats._transport.thread_comm import ThreadComm, ThreadWorld
from ddpstats.errors import RankMissing
from ddpstats.guard import _exchange
from ddpstats.guard._exchange import Exchange
from ddpstats.guard._failure_agreement import Alarm, FailureAgreement
from ddpstats.guard._status import RankStatus
from ddpstats.guard._store_notes import Note
from ddpstats.testing._threads import ThreadGroup

RANKS_OF_A_HOST = 8
LIMIT_SEC = 900.0
_STEADY_CALLS = 4
_COLLECTIVES = 8  # that the guard compares


@dataclass
class Counts:
    """Of one rank, or of all."""

    collectives: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0
    keys: int = 0  # named in these requests
    store_bytes: int = 0  # of keys and values, both ways

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Phase:
    """``seconds``: how long a phase lasted in which ranks wait; 0 for one that is counted by the call."""

    name: str
    world_size: int
    ranks: tuple[Counts, ...]
    calls: int = 1
    seconds: float = 0.0

    def per_rank(self, what: str) -> float:
        """The mean over ranks, of one call."""
        return sum(getattr(one, what) for one in self.ranks) / len(self.ranks) / self.calls

    def most(self, what: str) -> float:
        """Of the rank that has most of it."""
        return max(getattr(one, what) for one in self.ranks) / self.calls

    @property
    def requests_per_sec(self) -> float:
        """What all ranks together ask of the store while they wait."""
        return sum(one.requests for one in self.ranks) / self.seconds if self.seconds else 0.0


class Tally:
    """Which thread plays which rank, and what each has sent."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [Counts() for _ in range(world_size)]
        self._playing = threading.local()

    def plays(self, rank: int) -> None:
        self._playing.rank = rank

    @property
    def rank(self) -> int:
        return int(self._playing.rank)

    @property
    def mine(self) -> Counts:
        return self.ranks[self.rank]

    def taken(self) -> tuple[Counts, ...]:
        """What each rank has had since the last time."""
        found, self.ranks = tuple(self.ranks), [Counts() for _ in self.ranks]
        return found

    def request(self, keys: Sequence[str], values: Sequence[Any] = ()) -> None:
        mine = self.mine
        mine.requests += 1
        mine.keys += len(keys)
        mine.store_bytes += sum(map(len, keys)) + sum(map(len, values))


class CountingStore:
    """A store in memory that counts what it is asked."""

    def __init__(self, tally: Tally) -> None:
        self._store: Any = HashStore()
        self._tally = tally

    def set(self, key: str, value: str | bytes) -> None:
        self._tally.request([key], [value])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        found = bytes(self._store.get(key))
        self._tally.request([key], [found])
        return found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = list(map(bytes, self._store.multi_get(keys)))
        self._tally.request(keys, found)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        self._tally.request(keys)
        return bool(self._store.check(keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        found = bytes(self._store.compare_set(key, expected, value))
        self._tally.request([key], [value, found])
        return found

    def add(self, key: str, amount: int) -> int:
        self._tally.request([key])
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        self._tally.request([key])
        return bool(self._store.delete_key(key))


def counting_store(tally: Tally) -> BoundedStore:
    store = bounded(HashStore())
    store._connection._store = CountingStore(tally)
    return store


class CountingComm(ThreadComm):
    """Counts what this rank hands to a collective, and what it takes out of it."""

    def __init__(self, world: CountingWorld, rank: int) -> None:
        super().__init__(world, rank)
        self._tally = world.tally

    def all_reduce_sum(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._count(tensor.nbytes, tensor.nbytes)
        super().all_reduce_sum(tensor, timeout_sec)

    def all_reduce_max(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._count(tensor.nbytes, tensor.nbytes)
        super().all_reduce_max(tensor, timeout_sec)

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        self._count(len(payload), len(payload) * len(self.ranks))
        return super().all_gather(payload, timeout_sec)

    def broadcast(self, payload: bytes | None, size: int, source: int, timeout_sec: float) -> bytes:
        self._count(len(payload or b""), size)
        return super().broadcast(payload, size, source, timeout_sec)

    def _count(self, sent: int, received: int) -> None:
        mine = self._tally.mine
        mine.collectives += 1
        mine.sent_bytes += sent
        mine.received_bytes += received


class CountingWorld(ThreadWorld):
    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.tally = Tally(world_size)
        self.store: Any = counting_store(self.tally)

    def comm(self, rank: int) -> ThreadComm:
        return CountingComm(self, rank)


@contextmanager
def playing_hosts(tally: Tally) -> Iterator[None]:
    """Inside, the ranks live on hosts of `RANKS_OF_A_HOST` ranks each, which share no memory."""

    def process() -> ProcessId:
        return ProcessId((1 + tally.rank // RANKS_OF_A_HOST).to_bytes(16, "little"), 1, 0)

    def refuse(*args: Any) -> Any:
        raise OSError("no memory is shared between hosts")

    with mock.patch.object(ProcessId, "mine", process), mock.patch.object(_exchange._Shared, "of", refuse):
        yield


# -- reductions -------------------------------------------------------------------------------------------------------


def reductions(world_size: int, keys: int, own_keys: bool = True) -> list[Phase]:
    """Handshake, steady state, and new keys. ``own_keys``: also a call in which every rank has a new key of its own."""
    world, phases = CountingWorld(world_size), list[Phase]()
    stats = {f"key_{number}": float(number) for number in range(keys)}
    meet = threading.Barrier(world_size, timeout=LIMIT_SEC)

    def play(rank: int) -> None:
        world.tally.plays(rank)
        reducer = ThreadGroup(world, rank).reducer(timeout_sec=LIMIT_SEC)

        def phase(name: str, mine: dict[str, float], calls: int = 1) -> None:
            for _ in range(calls):
                reducer(mine)
            if meet.wait() == 0:
                phases.append(Phase(name, world_size, world.tally.taken(), calls))
            meet.wait()

        phase("first call", stats)
        phase("steady", stats, _STEADY_CALLS)
        phase("one new key", stats | {"new": 1.0} if rank == 0 else stats)
        if own_keys:
            phase("own new keys", stats | {f"of_rank_{rank}": 1.0})

    _on_hosts(world.tally, play)
    return phases


def waiting(world_size: int, seconds: float, timeout_sec: float = 300.0) -> Phase:
    """All ranks but one wait for so long for the last one, which is only late."""
    world = CountingWorld(world_size)
    meet = threading.Barrier(world_size, timeout=LIMIT_SEC)

    def play(rank: int) -> None:
        world.tally.plays(rank)
        reducer = ThreadGroup(world, rank).reducer(timeout_sec=timeout_sec)
        reducer({"loss": 1.0})
        if meet.wait() == 0:
            world.tally.taken()
        meet.wait()
        if rank == 0:
            time.sleep(seconds)
        reducer({"loss": 1.0})

    _on_hosts(world.tally, play)
    return Phase("waiting", world_size, world.tally.taken(), seconds=seconds)


def missing(world_size: int, timeout_sec: float, at_first_use: bool) -> Phase:
    """One rank never calls; the others come to the verdict on it."""
    world = CountingWorld(world_size)
    meet = threading.Barrier(world_size, timeout=LIMIT_SEC)
    said: set[str] = set()

    def play(rank: int) -> None:
        world.tally.plays(rank)
        reducer = ThreadGroup(world, rank).reducer(timeout_sec=timeout_sec)
        if not at_first_use:
            reducer({"loss": 1.0})
            if meet.wait() == 0:
                world.tally.taken()
            meet.wait()
        if rank != world_size - 1:
            try:
                reducer({"loss": 1.0})
            except RankMissing as error:
                said.add(f"{error.missing_ranks} {error}")

    started = time.monotonic()
    _on_hosts(world.tally, play)
    if len(said) != 1 or not said.pop().startswith(f"({world_size - 1},)"):
        raise RuntimeError(f"the ranks do not name the one that is missing: {said}")
    name = "missing at first use" if at_first_use else "missing"
    return Phase(name, world_size, world.tally.taken(), seconds=time.monotonic() - started)


def _on_hosts(tally: Tally, play: Callable[[int], None]) -> None:
    with playing_hosts(tally):
        _on_threads(len(tally.ranks), play)


def _on_threads(world_size: int, play: Callable[[int], None]) -> None:
    before = threading.stack_size(1 << 20)
    try:
        with ThreadPoolExecutor(world_size) as threads:
            for done in [threads.submit(play, rank) for rank in range(world_size)]:
                done.result(LIMIT_SEC)
    finally:
        threading.stack_size(before)


# -- the guard --------------------------------------------------------------------------------------------------------


def compared(world_size: int, hosts: bool) -> list[Phase]:
    """What a group that is met, and then one comparison, costs each rank: one collective in "strict", a step in "step".

    All ranks post, and then all look, so nobody waits.
    """
    tally, exchanges = Tally(world_size), list[Exchange]()
    store, name = counting_store(tally), "several hosts" if hosts else "one host"
    with playing_hosts(tally) if hosts else nullcontext():
        try:
            for rank in range(world_size):
                tally.plays(rank)
                exchanges.append(Exchange(store, rank, world_size))
            phases = [Phase(f"guard, {name}: meets a group", world_size, tally.taken())]
            for seq in range(1, _COLLECTIVES + 1):
                if seq == 2:  # at the first, ranks learn where the others are
                    tally.taken()
                for rank, exchange in enumerate(exchanges):
                    tally.plays(rank)
                    exchange.post(seq, Note(seq))
                for rank, exchange in enumerate(exchanges):
                    tally.plays(rank)
                    if not _exchange.agree(exchange.look(seq) or [Note(0), Note(1)]):
                        raise RuntimeError("equal notes do not agree")
            phases.append(Phase(f"guard, {name}: compares", world_size, tally.taken(), _COLLECTIVES - 1))
        finally:
            for exchange in exchanges:
                exchange.close()
    return phases


def guard_waiting(world_size: int, seconds: float) -> Phase:
    """Ranks of several hosts wait for so long for a note of the last one."""
    tally, exchanges = Tally(world_size), list[Exchange]()
    store = counting_store(tally)

    def play(rank: int) -> None:
        tally.plays(rank)
        if rank == 0:
            time.sleep(seconds)
        exchanges[rank].post(1, Note(1))
        exchanges[rank].wait(1, lambda: None)

    with playing_hosts(tally):
        for rank in range(world_size):
            tally.plays(rank)
            exchanges.append(Exchange(store, rank, world_size))
        tally.taken()
        _on_threads(world_size, play)
    return Phase("guard, several hosts: waits", world_size, tally.taken(), seconds=seconds)


def guard_verdict(world_size: int) -> Phase:
    """An alarm, every rank's status, the verdict. All ranks report; nobody is missing."""
    tally, agreements = Tally(world_size), list[FailureAgreement]()
    store, alarm = counting_store(tally), Alarm("0", "the default group", tuple(range(world_size)), 1, until=False)

    def play(rank: int) -> None:
        tally.plays(rank)
        agreements[rank].raise_alarm(alarm)

    with playing_hosts(tally):
        for rank in range(world_size):
            tally.plays(rank)
            roster, report = Roster(store, rank, range(world_size)), functools.partial(_status, rank)
            agreements.append(FailureAgreement(roster, report, str, lambda *told: [], lambda: False, _no_news))
        tally.taken()
        started = time.monotonic()
        _on_threads(world_size, play)
        took = time.monotonic() - started
    for agreement in agreements:
        agreement.close()
    return Phase("guard, verdict", world_size, tally.taken(), seconds=took)


def _no_news(finding: object) -> None:
    """Nothing has to be done at a verdict."""


def _status(rank: int, group: str) -> RankStatus:
    return RankStatus(rank)
