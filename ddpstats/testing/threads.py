"""Ranks that are threads of this process: reductions of this library over hundreds of ranks, without a socket.

The channel, the protocol and the failure detector are the real ones; only the `Comm` (`ThreadComm`) and the store are
not. So this tests what ranks say to each other, not gloo.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddpstats._ranks.calls import Channel
from ddpstats._ranks.comm import CommFailed, ReduceOp, Watch, wait_in_slices
from ddpstats._ranks.store import BoundedStore, Connection
from ddpstats._reduction.reducer import StatsReducer
from ddpstats.testing.outcomes import RankOutcome, RankOutcomes, RankTimedOut

Combine = Callable[[list[Any]], Any]
T = TypeVar("T")


class _InProcess(Connection):
    """A store in the memory of this process, which threads that are ranks share: it answers at once."""

    def __init__(self, store: Any) -> None:
        self.limits, self._store = threading.local(), store

    def ask(self, question: Callable[[Any], T], *_: Any, **__: Any) -> T:
        return question(self._store)

    def renew(self) -> None:
        """Do nothing: no request goes on."""


def in_process(store: Any) -> BoundedStore:
    """Return a store whose requests are answered by ``store`` at once, on the thread that asks."""
    made = BoundedStore(lambda: store)
    made._connection = _InProcess(store)
    return made


class ThreadWorld:
    """The rendezvous of ``world_size`` threads. A rank that `leave`s breaks it for all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store = in_process(dist.HashStore())  # type: ignore[attr-defined]
        self._changed = threading.Condition()
        self._parts: dict[int, Any] = {}
        self._round, self._broken = 0, ""
        self._result: Any = None

    def leave(self, rank: int) -> None:
        """Fail all ranks that wait for this one, now or later: it is gone."""
        with self._changed:
            self._break(f"Connection closed by peer {rank}")

    def meet(self, rank: int, part: Any, combine: Combine, timeout_sec: float, watch: Watch) -> Any:
        """Hand in ``part``; return ``combine`` of all parts in rank order once the last one has come."""
        with self._changed:
            this_round = self._round
            self._parts[rank] = part
            if len(self._parts) == self.world_size and not self._broken:
                self._finish(combine)

            def done_within(seconds: float) -> bool:
                return bool(self._changed.wait_for(lambda: self._round > this_round or self._broken, seconds))

            wait_in_slices(done_within, timeout_sec, watch)
            if self._round == this_round:
                raise CommFailed(self._broken, is_broken=True)
            return self._result

    def _finish(self, combine: Combine) -> None:
        try:
            self._result = combine([self._parts[rank] for rank in range(self.world_size)])
        except (RuntimeError, ValueError) as error:
            self._break(f"ranks disagree on the wire: {error}")
            return
        self._parts = {}
        self._round += 1
        self._changed.notify_all()

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._changed.notify_all()


class ThreadComm:
    """One thread's `Comm`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.ranks = tuple(range(world.world_size))
        self.rank = rank
        self.watch: Watch = lambda: None
        self._world = world

    def all_reduce(self, op: ReduceOp, tensor: torch.Tensor, timeout_sec: float) -> None:
        tensor.copy_(self._meet(tensor.clone(), _sum if op == "sum" else _max, timeout_sec))

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        return list(self._meet(bytes(payload), _same_length, timeout_sec))

    def broadcast(self, tensor: torch.Tensor, source: int, timeout_sec: float) -> None:
        tensor.copy_(self._meet(tensor.clone(), lambda parts: parts[source], timeout_sec))

    def _meet(self, part: Any, combine: Combine, timeout_sec: float) -> Any:
        return self._world.meet(self.rank, part, combine, timeout_sec, self.watch)

    def close(self) -> None:
        self._world.leave(self.rank)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _max(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).amax(dim=0)


def _same_length(parts: list[bytes]) -> list[bytes]:
    if len(set(map(len, parts))) > 1:
        raise ValueError(f"payloads of {sorted(set(map(len, parts)))} bytes")
    return parts


class ThreadGroup:
    """The stand-in for a process group that `run_threads` hands to its function: pass it as ``group=``."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank, self.world_size = rank, world.world_size
        self._world = world
        ranks = tuple(range(world.world_size))
        self.channel = Channel(
            ranks, rank, f"{world.world_size} threads", lambda timeout_sec, watch: ThreadComm(world, rank), world.store
        )

    def reducer(self, **settings: Any) -> StatsReducer:
        """A `StatsReducer` over the threads; takes its keyword arguments."""
        return StatsReducer(group=self, **settings)

    def leave(self) -> None:
        """This rank is gone: ranks that wait for it, now or later, fail."""
        self._world.leave(self.rank)


def run_threads(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_sec: float = 60.0, **kwargs: Any
) -> RankOutcomes:
    """Call ``fn(group, *args, **kwargs)`` on ``world_size`` threads at once, each with its own `ThreadGroup`.

    Blocks until all have returned, or ``timeout_sec`` seconds have passed; a thread cannot be killed, so one that is
    late is reported as `RankTimedOut` and left to end by itself (every wait of this library has a limit).
    """
    world = ThreadWorld(world_size)
    outcomes: dict[int, RankOutcome] = {}

    def run(rank: int) -> None:
        outcomes[rank] = RankOutcome.of(rank, lambda: fn(ThreadGroup(world, rank), *args, **kwargs))

    ranks = range(world_size)
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_sec
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {rank: RankOutcome(rank, error=RankTimedOut(rank, timeout_sec, "")) for rank in ranks}
    return RankOutcomes((late | outcomes).values())
