"""Nothing stays behind of a destroyed process group, nor of a process that ends."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import torch.distributed as dist

from ddpstats import StatsReducer, reduce_stats
from ddpstats.testing import RankPool, run_ranks
from tests.threads import lasting_threads


def system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def destroyed_groups() -> tuple[int, int, bool, int]:
    gc.collect()
    others = set(threading.enumerate())
    before = system_threads()
    gone = []
    for _ in range(3):
        group = dist.new_group()
        reducer = StatsReducer(group=group)
        reduce_stats({"a": 1.0}, group=group, name="kept")
        reducer({"a": 1.0})
        with StatsReducer(group=group) as other:
            other.start({"a": 1.0}).result()
        gone.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    lasting_threads()
    left = set(threading.enumerate()) - others
    return before, system_threads(), any(reference() is not None for reference in gone), len(left)


def test_a_destroyed_group_is_not_kept_alive(two_ranks: RankPool) -> None:
    for before, after, kept, workers in two_ranks.run(destroyed_groups).values():
        assert not kept
        assert after <= before
        assert workers == 0


def leaves_at_once(how: str) -> None:
    reduce_stats({"a": 1.0})
    reducer = StatsReducer(name="other")
    reducer.start({"a": 1.0}).result()
    if how == "destroy":
        dist.destroy_process_group()


def test_processes_end_cleanly_with_and_without_destroying_the_group() -> None:
    for how in ("destroy", "leave"):
        assert [outcome.exit_code for outcome in run_ranks(leaves_at_once, 2, how)] == [0, 0]
