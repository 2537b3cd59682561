"""Ranks that are threads of this process: reductions of this library over hundreds of ranks, without a socket.

The channel, the protocol and the failure detector are the real ones; only the `Comm` (`_thread_comm`) and the store are
not. So this tests what ranks say to each other, not gloo.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ddpstats._ranks.calls import Channel
from ddpstats._reduction.reducer import StatsReducer
from ddpstats.testing._rank_outcomes import RankOutcome, RankOutcomes, RankTimedOut
from ddpstats.testing._thread_comm import ThreadWorld


class ThreadGroup:
    """What a function run by `run_threads` is given in place of a process group: pass it as ``group=``."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank, self.world_size = rank, world.world_size
        self._world = world
        ranks = tuple(range(world.world_size))
        self.channel = Channel(
            ranks, rank, f"{world.world_size} threads", lambda timeout_sec, watch: world.comm(rank), world.store
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
        try:
            value = fn(ThreadGroup(world, rank), *args, **kwargs)
            outcomes[rank] = RankOutcome(rank, value, None, "", None)
        except BaseException as error:
            outcomes[rank] = RankOutcome(rank, None, error, "".join(traceback.format_exception(error)), None)

    ranks = range(world_size)
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_sec
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return RankOutcomes(outcomes.get(rank) or _late(rank, timeout_sec) for rank in ranks)


def _late(rank: int, timeout_sec: float) -> RankOutcome:
    return RankOutcome(rank, None, RankTimedOut(rank, timeout_sec, ""), "", None)
