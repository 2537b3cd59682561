"""Reductions are right where reducers end early, ranks come late, or results are never collected."""

from __future__ import annotations

import pickle
import signal
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from ddpstats import Max, Mean, PendingReduction, StatsReducer, reduce_stats
from ddpstats._base.paths import escape_path
from ddpstats._ranks.calls import ALONE, channel_of
from ddpstats._reduction import read
from ddpstats._reduction.flatten import Flat, Structure
from ddpstats.testing import RankPool, run_ranks
from tests.reduction import lifetime_runs as runs
from tests.reduction.off_host import tensors_off_host


def test_a_reducer_may_be_dropped_before_its_reductions_are_done(two_ranks: RankPool) -> None:
    for found, threads in two_ranks.run(runs.dropped_reducers).values():
        assert found == [[{name: float(i)} for name in ("a", "b", "c")] for i in range(30)]
        assert threads == []


def test_a_result_waits_for_a_peer_that_is_late(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.late_peer).values() == [{"x": 1.0}, {"x": 1.0}]


def test_a_call_that_queued_behind_another_leaves_no_thread(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.two_threads).values() == [[], []]


def test_another_default_device_changes_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.other_default_device).values() == [({"m": 1.0, "l": 1.0}, "cpu")] * 2


def test_a_group_of_one_names_its_own_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.alone_with_a_fault).values() == [[(0,)] * 3, [(1,)] * 3]


def test_host_values_are_taken_when_the_reduction_starts_also_beside_an_accelerators() -> None:
    away, host, weight = torch.tensor(1.0), torch.tensor(5.0), torch.tensor([2.0])
    array = np.array([3.0])

    def is_off_host(tensor: torch.Tensor) -> bool:
        return tensor is away

    with tensors_off_host(is_off_host), StatsReducer() as reducer:
        stats = {"away": away, "host": host, "array": array, "mean": Mean(host, weight=host)}
        first, second = reducer.start(stats, weight), reducer.start(stats, weight)
        host.fill_(-100.0)
        array[0] = -100.0
        weight.fill_(50.0)
        for pending in (first, second):
            found = pending.result()
            assert found.values == {"away": 1.0, "host": 5.0, "array": 3.0, "mean": 5.0}
            assert found.total_weight == 2.0


def test_an_empty_key_beside_one_that_begins_with_a_slash() -> None:
    assert reduce_stats({"": {"b": 1.0}, "/b": 2.0}).flat().keys() == {r"\e/b", r"\/b"}
    assert escape_path(("", "b")) != escape_path(("/b",))
    assert escape_path(("\\e",)) != escape_path(("",))


def test_the_host_of_the_store_is_killed() -> None:
    for rank, found in enumerate(run_ranks(runs.killed_store_host, 3)):
        if rank == 0:
            continue
        kind, missing, text, again, waited_sec = found.value
        assert (kind, missing, again) == ("RankMissing", (0,), "RankMissing")
        assert "rank 0: the process is gone" in text
        assert "The store, which could say which rank is missing, does not answer" in text
        assert waited_sec < 15


@pytest.mark.parametrize("count", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_reduction_that_nobody_collects_does_not_spoil_the_end_of_the_process(count: int) -> None:
    assert [(outcome.error, outcome.exit_code) for outcome in run_ranks(runs.left_pending, 2, count)] == [(None, 0)] * 2


def test_the_drop_in_and_a_name_that_is_spelled_like_it_are_two(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.names_of_the_drop_in).values() == [{"a": 1.0}] * 2


def test_a_conflict_names_all_ranks_and_the_group(three_ranks: RankPool) -> None:
    group = "the default group of 3 ranks"
    for (text, *first), (_, *second) in three_ranks.run(runs.conflicts_on_six_paths).values():
        assert (first, second) == ([(0, 1, 2), "k0", group], [(0, 1, 2), None, group])
        assert "different things under 'k0':\n  ranks 0, 2: a leaf (mean)\n  rank 1: a list with 1 entry" in text
        assert "and 1 more path" in text


def test_one_copy_of_all_tensors_brings_back_values_shapes_and_markers() -> None:
    """The copy from an accelerator groups tensors by dtype and cuts one vector; here it runs on host tensors."""
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3), torch.tensor(True), torch.tensor([[4.0]]).double()]
    leaves = [tensors[0], Mean(tensors[1], tensors[2]), Max(tensors[3]), 5.0, None]
    (_, back), weight = read.Snapshot(Flat(Structure((), ()), leaves), tensors[0], tensors).wait()
    assert back[0].tolist() == [1.0, 2.0]
    assert (back[1].value.item(), back[1].weight.item()) == (3.0, 1.0)
    assert back[2].value.tolist() == [[4.0]]
    assert back[3:] == [5.0, None]
    assert weight.dtype == torch.float64


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


def test_a_result_can_be_pickled() -> None:
    found = reduce_stats({"a": [1.0, Max(2.0)], "b": (None,)})
    again = pickle.loads(pickle.dumps(found))
    assert (again.values, again.weights, again.flat()) == (found.values, found.weights, found.flat())


def test_integrations_load_when_they_are_asked_for() -> None:
    import ddpstats

    assert callable(ddpstats.integrations.espnet.install)
    assert "espnet" in dir(ddpstats.integrations)
    with pytest.raises(AttributeError, match="no attribute 'espnot'"):
        ddpstats.integrations.espnot  # noqa: B018
