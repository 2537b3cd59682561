"""Reductions are right where reducers end early, ranks come late or results are never collected; nothing is left."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import Max, Mean, PendingReduction, StatsReducer, reduce_stats
from ddpstats._ranks import calls
from ddpstats._ranks.calls import ALONE, channel_of
from ddpstats.testing import RankPool, run_ranks
from tests.reduction.off_host import tensors_off_host
from tests.threads import lasting_threads


def threads() -> list[str]:
    """Return the names of our threads, once those that are about to end have had the time to."""
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline and any(thread.name == "ddpstats" for thread in threading.enumerate()):
        time.sleep(0.01)
    return [thread.name for thread in threading.enumerate() if thread.name == "ddpstats"]


def dropped_reducers() -> tuple[list[Any], list[str]]:
    """Start reductions as ``StatsReducer(...).start(stats)`` does: the reducer is gone before they are done."""
    results = []
    for i in range(30):
        started = [StatsReducer(name=name, timeout_sec=20).start({name: float(i)}) for name in ("a", "b", "c")]
        results.append([pending.result().values for pending in started])
    return results, threads()


def test_a_reducer_may_be_dropped_before_its_reductions_are_done(two_ranks: RankPool) -> None:
    for results, left in two_ranks.run(dropped_reducers).values():
        assert results == [[{name: float(i)} for name in ("a", "b", "c")] for i in range(30)]
        assert left == []


def late_peer() -> Any:
    """Let rank 1 be so late that rank 0 checks several times whether its result can still come."""
    reduce_stats({"a": 1.0})
    with mock.patch.object(calls, "_POLL_SEC", 0.05):
        if dist.get_rank() == 1:
            time.sleep(1)
        return StatsReducer(name="late", timeout_sec=30).start({"x": 1.0}).result().values


def test_a_result_waits_for_a_peer_that_is_late(two_ranks: RankPool) -> None:
    assert two_ranks.run(late_peer).values() == [{"x": 1.0}, {"x": 1.0}]


def other_default_device() -> Any:
    """Reduce where new tensors are made on another device, as under ``torch.set_default_device("cuda")``."""
    with torch.device("meta"):
        total = ddpstats.recursive_average({"l": torch.ones(1, device="cpu")}, torch.ones(1, device="cpu"), True)[1]
        return reduce_stats({"m": Max(float(dist.get_rank())), "l": 1.0}, name="device").values, str(total.device)


def test_another_default_device_changes_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(other_default_device).values() == [({"m": 1.0, "l": 1.0}, "cpu")] * 2


def alone_with_a_fault() -> list[tuple[int, ...]]:
    """Return the ranks that the errors of a group of one name."""
    group: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ranks = []
    for call in (
        lambda: reduce_stats({"a": "text"}, group=group),
        lambda: ddpstats.recursive_average({"a": "text"}, torch.ones(1)),
        lambda: reduce_stats({"a": float("nan")}, group=group, nonfinite="raise"),
    ):
        with contextlib.suppress(ZeroDivisionError):
            try:
                call()
            except ddpstats.DdpstatsError as error:
                ranks.append(error.ranks)
    return ranks


def test_a_group_of_one_names_its_own_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(alone_with_a_fault).values() == [[(0,)] * 3, [(1,)] * 3]


class Changing:
    """A number of a foreign type that changes."""

    value = 7.0

    def __float__(self) -> float:
        return self.value


def test_host_values_are_taken_when_the_reduction_starts_also_beside_an_accelerators() -> None:
    away, host, weight = torch.tensor(1.0), torch.tensor(5.0), torch.tensor([2.0])
    array, foreign = np.array([3.0]), Changing()

    def is_off_host(tensor: torch.Tensor) -> bool:
        return tensor is away

    with tensors_off_host(is_off_host), StatsReducer() as reducer:
        stats = {"away": away, "host": host, "array": array, "mean": Mean(host, weight=host), "foreign": foreign}
        first, second = reducer.start(stats, weight), reducer.start(stats, weight)
        host.fill_(-100.0)
        array[0] = foreign.value = -100.0
        weight.fill_(50.0)
        for pending in (first, second):
            reduced = pending.result()
            assert reduced.values == {"away": 1.0, "host": 5.0, "array": 3.0, "mean": 5.0, "foreign": 7.0}
            assert reduced.total_weight == 2.0


_kept: list[Any] = []


def left_pending(count: int) -> None:
    """Leave the process with a reduction whose result was not asked for, and its reducer alive."""
    reducer = StatsReducer(name="pending")
    stats = {f"k{i}": 1.0 for i in range(count)}
    reducer(stats)
    _kept.extend((reducer, reducer.start(stats)))


@pytest.mark.parametrize("count", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_reduction_whose_result_is_not_asked_for_does_not_spoil_the_end_of_the_process(count: int) -> None:
    assert [(outcome.error, outcome.exit_code) for outcome in run_ranks(left_pending, 2, count)] == [(None, 0)] * 2


def names_of_the_drop_in() -> Any:
    """Reduce with the drop-in, and under a name that is spelled like it."""
    loss = torch.ones(1, dtype=torch.float16 if dist.get_rank() else torch.float32)
    ddpstats.recursive_average({"a": loss}, torch.ones(1), True)
    return reduce_stats({"a": 1.0}, name="recursive_average").values


def test_the_drop_in_and_a_name_that_is_spelled_like_it_are_two(two_ranks: RankPool) -> None:
    assert two_ranks.run(names_of_the_drop_in).values() == [{"a": 1.0}] * 2


def test_a_timeout_error_of_the_user_comes_through_result() -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise TimeoutError("mine")

    future: Future[Any] = Future()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="mine"):
            PendingReduction(future, channel_of(ALONE)).result()
    finally:
        signal.signal(signal.SIGALRM, before)


def system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def destroyed_groups() -> tuple[int, int, bool, int]:
    gc.collect()
    threads_before = set(threading.enumerate())
    before = system_threads()
    gone = []
    for _ in range(3):
        group = dist.new_group()
        reducer = StatsReducer(group=group)
        reduce_stats({"a": 1.0}, group=group, name="kept")
        reducer({"a": 1.0})
        with StatsReducer(group=group) as starting:
            starting.start({"a": 1.0}).result()
        gone.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    lasting_threads()
    left = set(threading.enumerate()) - threads_before
    return before, system_threads(), any(reference() is not None for reference in gone), len(left)


def test_a_destroyed_group_is_not_kept_alive(two_ranks: RankPool) -> None:
    for before, after, kept, workers in two_ranks.run(destroyed_groups).values():
        assert not kept
        assert after <= before
        assert workers == 0
