"""What the protocol costs a rank: ranks are threads, and every collective and every request to the store is counted.

The code that runs is the real one (`ddpstats._ranks`, `guard`); only the wire and the store are in
memory. So the counts are exact, and the seconds mean nothing.

Of collectives, a few ranks are played, and the last of them stands for all others, which do the same: its numbers count
so often in a sum, and its bytes stand so often in a gather (`CountingWorld`). Of the store, all ranks are played.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._ranks.calls import Channel
from ddpstats._ranks.failure import FailureDetector, Membership, ProcessId, Verdict
from ddpstats._ranks.store import BoundedStore
from ddpstats._reduction.reducer import StatsReducer
from ddpstats.guard import notes_shm
from ddpstats.guard.diagnosis import Alarm, RankStatus
from ddpstats.guard.failure_agreement import FailureAgreement
from ddpstats.guard.notes import Note, agree
from ddpstats.guard.notes_shm import Exchange
from ddpstats.testing.threads import ThreadComm, ThreadWorld, in_process

RANKS_OF_A_HOST = 8
MOST_ON_A_HOST = 256  # a guard of more ranks than that shares no memory
PLAYED = 3  # ranks that differ in the calls below: 0, 1 and all others
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
    looks: int = 0  # of these requests, for a verdict
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
        return float(sum(getattr(one, what) for one in self.ranks) / len(self.ranks) / self.calls)

    def most(self, what: str) -> float:
        """Of the rank that has most of it."""
        return float(max(getattr(one, what) for one in self.ranks) / self.calls)

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
        mine.looks += keys[0] == "verdict"
        mine.store_bytes += sum(map(len, keys)) + sum(map(len, values))


class CountingStore:
    """A store in memory, with torch's methods, that counts what it is asked."""

    def __init__(self, tally: Tally) -> None:
        self._held: dict[str, bytes] = {}
        self._lock = threading.Lock()  # of torch's own store each request would let go of the GIL, and wait for it
        self._tally = tally

    def set(self, key: str, value: str | bytes) -> None:
        self._tally.request([key], [value])
        self._held[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self._held[key] for key in keys]
        self._tally.request(keys, found)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        self._tally.request(keys)
        return all(key in self._held for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._lock:
            if self._held.get(key, b"") == expected.encode():
                self._held[key] = value.encode()
            found = self._held.get(key, expected.encode())
        self._tally.request([key], [value, found])
        return found

    def add(self, key: str, amount: int) -> int:
        self._tally.request([key])
        with self._lock:
            count = int(self._held.get(key, b"0")) + amount
            self._held[key] = str(count).encode()
        return count

    def delete_key(self, key: str) -> bool:
        self._tally.request([key])
        return self._held.pop(key, None) is not None


def counting_store(tally: Tally) -> BoundedStore:
    return in_process(CountingStore(tally))


class CountingWorld(ThreadWorld):
    """``world_size`` ranks, of which ``played`` are threads: the last of these stands for all that are not."""

    def __init__(self, world_size: int, played: int) -> None:
        super().__init__(played)
        self.all_ranks, self.tally = tuple(range(world_size)), Tally(played)
        self.alike = world_size - played + 1  # ranks that the last one stands for, itself included

    def comm(self, rank: int) -> ThreadComm:
        return CountingComm(self, rank)


class CountingComm(ThreadComm):
    """Counts what this rank hands to a collective, and what it takes out of it."""

    def __init__(self, world: CountingWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.ranks = world.all_ranks
        self._tally, self._alike, self._is_last = world.tally, world.alike, rank == world.world_size - 1

    def all_reduce_sum(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._count(tensor.nbytes, tensor.nbytes)
        if self._is_last:
            tensor *= self._alike
        super().all_reduce_sum(tensor, timeout_sec)

    def all_reduce_max(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._count(tensor.nbytes, tensor.nbytes)
        super().all_reduce_max(tensor, timeout_sec)

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        self._count(len(payload), len(payload) * len(self.ranks))
        *some, last = super().all_gather(payload, timeout_sec)
        return [*some, *[last] * self._alike]

    def _count(self, sent: int, received: int) -> None:
        mine = self._tally.mine
        mine.collectives += 1
        mine.sent_bytes += sent
        mine.received_bytes += received


@contextmanager
def playing_hosts(tally: Tally) -> Iterator[None]:
    """Inside, the ranks live on hosts of `RANKS_OF_A_HOST` ranks each, which share no memory."""

    def process() -> ProcessId:
        return ProcessId((1 + tally.rank // RANKS_OF_A_HOST).to_bytes(16, "little"), 1, 0)

    def refuse(*args: Any) -> Any:
        raise OSError("no memory is shared between hosts")

    with mock.patch.object(ProcessId, "mine", process), mock.patch.object(notes_shm._Shared, "of", refuse):
        yield


# -- reductions -------------------------------------------------------------------------------------------------------


def reductions(world_size: int, keys: int, played: int = PLAYED) -> list[Phase]:
    """The handshake, and calls: the first, the same again, one with a new key on one rank, one with one on each rank.

    Where not all ranks are ``played``, those that are not have the same new key as the last of them.
    """
    world, phases = CountingWorld(world_size, played), list[Phase]()
    stats = {f"key_{number}": float(number) for number in range(keys)}
    meet = threading.Barrier(played, timeout=LIMIT_SEC)

    def play(rank: int) -> None:
        world.tally.plays(rank)
        comm = world.comm(rank)
        channel = Channel(world.all_ranks, rank, "threads", lambda timeout_sec, watch: comm, in_process(HashStore()))
        channel._detector = None  # the store is counted by itself

        def phase(name: str, call: Callable[[], object], calls: int = 1) -> None:
            for _ in range(calls):
                call()
            if meet.wait() == 0:
                phases.append(Phase(name, world_size, world.tally.taken(), calls))
            meet.wait()

        reducer = StatsReducer(group=SimpleNamespace(channel=channel), timeout_sec=LIMIT_SEC)
        one_new = stats | {"new": 1.0} if rank == 0 else stats
        phase("handshake", lambda: channel._shake_hands(comm, LIMIT_SEC))
        phase("first call", lambda: reducer(stats))
        phase("steady", lambda: reducer(stats), _STEADY_CALLS)
        phase("one new key", lambda: reducer(one_new))
        phase("own new keys", lambda: _reduce_own(reducer, stats | {f"of_rank_{rank}": 1.0}, keys + played))

    _on_threads(played, play)
    return phases


def _reduce_own(reducer: StatsReducer, stats: dict[str, float], union: int) -> None:
    if len(reducer(stats).values) != union:
        raise RuntimeError("the result does not hold the keys of all ranks")


# -- the store --------------------------------------------------------------------------------------------------------


def meeting(world_size: int) -> Phase:
    """All ranks come to a group for the first time, and nobody has to wait."""
    tally = Tally(world_size)
    store = counting_store(tally)
    with playing_hosts(tally):
        detectors = [FailureDetector(store, rank, range(world_size), "the test") for rank in range(world_size)]
        for detector in detectors:
            tally.plays(detector.rank)
            detector.members.join()
        for detector in detectors:
            tally.plays(detector.rank)
            detector.members.join = lambda: None  # type: ignore[method-assign]  # it has
            detector.meet(time.monotonic() + LIMIT_SEC, 1.0)
    return Phase("first use", world_size, tally.taken())


def missing_at_first_use(world_size: int, timeout_sec: float) -> Phase:
    """One rank never comes."""

    def play(detector: FailureDetector) -> None:
        if detector.rank:
            _name_rank_0(detector.meet(time.monotonic() + timeout_sec, 1.0))

    return _in_detectors("missing at first use", world_size, play)


def waiting(world_size: int, looks: int) -> Phase:
    """Ranks look so often, once a second, while they wait in a collective; for one second of it."""

    def play(detector: FailureDetector) -> None:
        for _ in range(looks):
            detector._polls_at = 0.0  # a second later
            detector.poll()

    return _in_detectors("waiting", world_size, play, calls=looks)


def missing(world_size: int, timeout_sec: float) -> Phase:
    """One rank never comes to a collective that failed."""

    def play(detector: FailureDetector) -> None:
        if detector.rank:
            now = time.monotonic()
            _name_rank_0(detector.decide(1, "", is_broken=False, started=now, deadline=now + timeout_sec))

    return _in_detectors("missing", world_size, play)


def _name_rank_0(verdict: Verdict | None) -> None:
    if verdict is None or verdict.missing != (0,):
        raise RuntimeError(f"the verdict does not name the rank that is missing: {verdict}")


def _in_detectors(name: str, world_size: int, play: Callable[[FailureDetector], object], calls: int = 1) -> Phase:
    tally = Tally(world_size)
    store, start, started = counting_store(tally), threading.Barrier(world_size, timeout=LIMIT_SEC), [0.0]

    def one(rank: int) -> None:
        tally.plays(rank)
        detector = FailureDetector(store, rank, range(world_size), "the test")
        if start.wait() == 0:
            started[0] = time.monotonic()
        play(detector)

    with playing_hosts(tally):
        _on_threads(world_size, one)
    return Phase(name, world_size, tally.taken(), calls, time.monotonic() - started[0])


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
                    if not agree(exchange.look(seq) or [Note(0), Note(1)]):
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
    store, alarm = counting_store(tally), Alarm("0", "the default group", tuple(range(world_size)), 1, overdue=False)

    def play(rank: int) -> None:
        tally.plays(rank)
        agreements[rank].raise_alarm(alarm)

    with playing_hosts(tally):
        for rank in range(world_size):
            tally.plays(rank)
            roster, report = Membership(store, rank, range(world_size)), functools.partial(_status, rank)
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
