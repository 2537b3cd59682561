"""Counts of what the protocol costs a rank: ranks are threads, and each collective and request to the store counts.

The code that runs is the real one (`ddpstats._ranks`, `guard`). Only the wire and the store are in memory.

Of collectives, three ranks are played, and the last of them represents all others, which do the same: its numbers count
so often in a sum, and its bytes come so often in a gather (`CountingWorld`). Of the store, all ranks are played.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._ranks.calls import Channel
from ddpstats._ranks.comm import ReduceOp
from ddpstats._ranks.failure import FailureDetector, Membership, ProcessId, Verdict
from ddpstats._ranks.store import BoundedStore
from ddpstats._reduction.reducer import StatsReducer
from ddpstats.guard import notes_shm
from ddpstats.guard.diagnosis import Alarm, GuardFinding, RankStatus
from ddpstats.guard.failure_agreement import FailureAgreement
from ddpstats.guard.notes import Note, agree
from ddpstats.guard.notes_shm import Exchange
from ddpstats.testing.threads import ThreadComm, ThreadWorld, in_process

RANKS_OF_A_HOST = 8
PLAYED = 3  # ranks that differ in the calls below: 0, 1 and all others
LIMIT_SEC = 900.0
_STEADY_CALLS = 4
_COLLECTIVES = 8  # that the guard compares


@dataclass
class Counts:
    """Counts of what one rank has sent, received and asked for."""

    collectives: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0
    keys: int = 0  # named in these requests
    looks: int = 0  # of these requests, for a verdict


class Phase(NamedTuple):
    """The counts of all ranks in one phase, which is of so many equal calls."""

    ranks: tuple[Counts, ...]
    calls: int = 1

    def per_rank(self, what: str) -> float:
        """Return the mean over ranks, of one call."""
        return float(sum(getattr(counts, what) for counts in self.ranks) / len(self.ranks) / self.calls)

    def most(self, what: str) -> float:
        """Return the count of the rank that has most of it, of one call."""
        return float(max(getattr(counts, what) for counts in self.ranks) / self.calls)


class Tally:
    """Knows which thread plays which rank, and counts what each does."""

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

    def take(self, calls: int = 1) -> Phase:
        """Return what each rank has done since the last time."""
        ranks, self.ranks = tuple(self.ranks), [Counts() for _ in self.ranks]
        return Phase(ranks, calls)

    def request(self, keys: Sequence[str]) -> None:
        counts = self.mine
        counts.requests += 1
        counts.keys += len(keys)
        counts.looks += keys[0] == "verdict"


class CountingStore:
    """A store in memory, with torch's methods, that counts what it is asked."""

    def __init__(self, tally: Tally) -> None:
        self._held: dict[str, bytes] = {}
        self._lock = threading.Lock()  # of torch's own store each request would let go of the GIL, and wait for it
        self._tally = tally

    def set(self, key: str, value: str | bytes) -> None:
        self._tally.request([key])
        self._held[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._tally.request(keys)
        return [self._held[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        self._tally.request(keys)
        return all(key in self._held for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._tally.request([key])
        with self._lock:
            if self._held.get(key, b"") == expected.encode():
                self._held[key] = value.encode()
            return self._held.get(key, expected.encode())

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
    """``world_size`` ranks, of which ``played`` are threads: the last of these represents all that are not."""

    def __init__(self, world_size: int, played: int) -> None:
        super().__init__(played)
        self.all_ranks, self.tally = tuple(range(world_size)), Tally(played)
        self.alike = world_size - played + 1  # ranks that the last one represents, itself included


class CountingComm(ThreadComm):
    """Counts what this rank hands to a collective, and what it takes out of it."""

    def __init__(self, world: CountingWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.ranks = world.all_ranks
        self._tally, self._alike, self._is_last = world.tally, world.alike, rank == world.world_size - 1

    def all_reduce(self, op: ReduceOp, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._count(tensor.nbytes, tensor.nbytes)
        if self._is_last and op == "sum":
            tensor *= self._alike
        super().all_reduce(op, tensor, timeout_sec)

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        self._count(len(payload), len(payload) * len(self.ranks))
        *some, last = super().all_gather(payload, timeout_sec)
        return [*some, *[last] * self._alike]

    def _count(self, sent: int, received: int) -> None:
        counts = self._tally.mine
        counts.collectives += 1
        counts.sent_bytes += sent
        counts.received_bytes += received


@contextmanager
def playing_hosts(tally: Tally) -> Iterator[None]:
    """Inside, the ranks live on hosts of `RANKS_OF_A_HOST` ranks each, which share no memory."""

    def process() -> ProcessId:
        return ProcessId((1 + tally.rank // RANKS_OF_A_HOST).to_bytes(16, "little"), 1, 0)

    def refuse(*args: Any) -> Any:
        raise OSError("no memory is shared between hosts")

    with mock.patch.object(ProcessId, "mine", process), mock.patch.object(notes_shm._SharedMemory, "of", refuse):
        yield


# -- reductions -------------------------------------------------------------------------------------------------------


def reductions(world_size: int, keys: int, played: int = PLAYED) -> dict[str, Phase]:
    """Count the handshake, and calls: the first, the same again, and one with a new key on one rank."""
    world, phases = CountingWorld(world_size, played), dict[str, Phase]()
    stats = {f"key_{number}": float(number) for number in range(keys)}
    meet = threading.Barrier(played, timeout=LIMIT_SEC)

    def play(rank: int) -> None:
        world.tally.plays(rank)
        comm = CountingComm(world, rank)
        channel = Channel(world.all_ranks, rank, "threads", lambda timeout_sec, watch: comm, in_process(HashStore()))
        channel._detector = None  # the store is counted by itself

        def phase(name: str, call: Callable[[], object], calls: int = 1) -> None:
            for _ in range(calls):
                call()
            if meet.wait() == 0:
                phases[name] = world.tally.take(calls)
            meet.wait()

        reducer = StatsReducer(group=SimpleNamespace(channel=channel), timeout_sec=LIMIT_SEC)
        phase("handshake", lambda: channel._shake_hands(comm, LIMIT_SEC))
        phase("first call", lambda: reducer(stats))
        phase("steady", lambda: reducer(stats), _STEADY_CALLS)
        phase("new key", lambda: reducer(stats | {"new": 1.0} if rank == 0 else stats))

    _on_threads(played, play)
    return phases


# -- the store --------------------------------------------------------------------------------------------------------


def meeting(world_size: int) -> Phase:
    """Count the first use of a group, for which no rank has to wait."""
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
            detector.rendezvous(time.monotonic() + LIMIT_SEC, 1.0)
    return tally.take()


def waiting(world_size: int, looks: int) -> Phase:
    """Count one look, of so many, into the store while ranks wait in a collective."""

    def play(detector: FailureDetector) -> None:
        for _ in range(looks):
            detector._polls_at = 0.0  # a second later
            detector.poll()

    return _in_detectors(world_size, play, calls=looks)


def missing_at_first_use(world_size: int, timeout_sec: float) -> Phase:
    """Count what ranks ask at the first use of a group to which rank 0 never comes."""

    def play(detector: FailureDetector) -> None:
        if detector.rank:
            _names_rank_0(detector.rendezvous(time.monotonic() + timeout_sec, 1.0))

    return _in_detectors(world_size, play)


def missing(world_size: int, timeout_sec: float) -> Phase:
    """Count what ranks ask in a collective that failed and to which rank 0 never comes."""

    def play(detector: FailureDetector) -> None:
        if detector.rank:
            now = time.monotonic()
            _names_rank_0(detector.decide(1, "", is_broken=False, started=now, deadline=now + timeout_sec))

    return _in_detectors(world_size, play)


def _names_rank_0(verdict: Verdict | None) -> None:
    if verdict is None or verdict.missing != (0,):
        raise RuntimeError(f"the verdict does not name the rank that is missing: {verdict}")


def _in_detectors(world_size: int, play: Callable[[FailureDetector], object], calls: int = 1) -> Phase:
    tally = Tally(world_size)
    store, start = counting_store(tally), threading.Barrier(world_size, timeout=LIMIT_SEC)

    def play_rank(rank: int) -> None:
        tally.plays(rank)
        detector = FailureDetector(store, rank, range(world_size), "the test")
        start.wait()
        play(detector)

    with playing_hosts(tally):
        _on_threads(world_size, play_rank)
    return tally.take(calls)


def _on_threads(world_size: int, play: Callable[[int], None]) -> None:
    before = threading.stack_size(1 << 20)
    try:
        with ThreadPoolExecutor(world_size) as threads:
            for done in [threads.submit(play, rank) for rank in range(world_size)]:
                done.result(LIMIT_SEC)
    finally:
        threading.stack_size(before)


# -- the guard --------------------------------------------------------------------------------------------------------


def comparison(world_size: int, hosts: bool) -> Phase:
    """Count one comparison of the guard: one collective in "strict", a step in "step". No rank waits for another."""
    tally, exchanges = Tally(world_size), list[Exchange]()
    store = counting_store(tally)
    with playing_hosts(tally) if hosts else nullcontext():
        try:
            for rank in range(world_size):
                tally.plays(rank)
                exchanges.append(Exchange(store, rank, world_size))
            for seq in range(1, _COLLECTIVES + 1):
                if seq == 2:  # at the first, ranks learn where the others are
                    tally.take()
                for rank, exchange in enumerate(exchanges):
                    tally.plays(rank)
                    exchange.post(seq, Note(seq))
                for rank, exchange in enumerate(exchanges):
                    tally.plays(rank)
                    if not agree(exchange.look(seq) or [Note(0), Note(1)]):
                        raise RuntimeError("equal notes do not agree")
            return tally.take(_COLLECTIVES - 1)
        finally:
            for exchange in exchanges:
                exchange.close()


def guard_waiting(world_size: int, seconds: float) -> Phase:
    """Count what ranks of several hosts ask while they wait for so long for a note of rank 0."""
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
        tally.take()
        _on_threads(world_size, play)
    return tally.take()


def guard_verdict(world_size: int) -> Phase:
    """Count an alarm, every rank's status and the verdict. All ranks report; no rank is missing."""
    tally, agreements = Tally(world_size), list[FailureAgreement]()
    store, alarm = counting_store(tally), Alarm("0", "the default group", tuple(range(world_size)), 1, overdue=False)

    def play(rank: int) -> None:
        tally.plays(rank)
        agreements[rank].raise_alarm(alarm)

    with playing_hosts(tally):
        for rank in range(world_size):
            tally.plays(rank)
            members, own = Membership(store, rank, range(world_size)), _OwnRank(rank)
            agreements.append(FailureAgreement(members, own, lambda *_: [], lambda: False))
        tally.take()
        _on_threads(world_size, play)
    for agreement in agreements:
        agreement.close()
    return tally.take()


class _OwnRank:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def report_status(self, name: str) -> RankStatus:
        return RankStatus(self._rank)

    def position(self) -> str:
        return ""

    def take_verdict(self, finding: GuardFinding) -> None:
        pass
