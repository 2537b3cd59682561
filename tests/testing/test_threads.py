"""`run_threads` runs its ranks at the same time, and reports one that is late."""

from __future__ import annotations

import threading
import time

from ddpstats.testing import RankTimedOut, ThreadGroup, run_threads


def test_all_threads_run_at_once() -> None:
    world_size = 40
    everybody = threading.Barrier(world_size, timeout=20)

    def meet(group: ThreadGroup) -> tuple[int, int]:
        everybody.wait()
        return group.rank, group.world_size

    assert run_threads(meet, world_size).values() == [(rank, world_size) for rank in range(world_size)]


def test_a_thread_that_is_late_is_left_to_end_by_itself() -> None:
    release, ended = threading.Event(), threading.Event()

    def wait_on_rank_1(group: ThreadGroup) -> str:
        if group.rank == 1:
            release.wait(20)
            ended.set()
        return "done"

    started = time.monotonic()
    outcomes = run_threads(wait_on_rank_1, 2, timeout_sec=1.0)
    assert 1.0 <= time.monotonic() - started < 2 * 1.0 + 5.0
    assert outcomes[0].value == "done"
    assert isinstance(outcomes.errors()[1], RankTimedOut)
    assert not ended.is_set()
    release.set()
    assert ended.wait(20)
