"""Reducers that end early, ranks that come late, threads that stay: what a long program does to the library."""

from __future__ import annotations

import math
import pickle
import signal
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch

from ddpstats import ConfigError, InvalidStats, Max, Mean, PendingReduction, StatsReducer, reduce_stats
from ddpstats._agreement.channel import ALONE, channel_of
from ddpstats._base.paths import escape_path
from ddpstats._reduction import host_copy
from ddpstats.recursive_op import _device
from ddpstats.testing import RankPool, run_ranks
from tests.reduction import lifetime_runs as runs


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
    array = pytest.importorskip("numpy").array([3.0])

    def is_away(tensor: torch.Tensor) -> bool:
        return tensor is away

    with (
        mock.patch.object(host_copy, "_is_away", is_away),
        mock.patch("ddpstats._reduction.values.accelerator_in_use", return_value=True),
        mock.patch("ddpstats._reduction.values._is_cpu", lambda tensor: not is_away(tensor)),
        StatsReducer() as reducer,
    ):
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


def test_arguments_of_other_types() -> None:
    with pytest.raises(ConfigError, match="name="):
        reduce_stats({}, name=["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_sec='30'"):
        StatsReducer(timeout_sec="30")  # type: ignore[arg-type]
    with pytest.raises(InvalidStats, match=r"the weight is a tensor of shape \(2, 2\); it is a real number or a 1-d"):
        reduce_stats({"a": 1.0}, torch.ones(2, 2))


def test_results_go_where_the_leaves_are() -> None:
    away = torch.empty(1, device="meta")
    with mock.patch("ddpstats.recursive_op.accelerator_in_use", return_value=True):
        for obj in ({"a": [1.0, away]}, {"a": Mean(away)}):
            assert _device(obj, torch.ones(1)) == away.device
        assert _device({"a": torch.ones(1)}, torch.ones(1)) == torch.device("cpu")
        assert _device({"a": 1.0}, away) == away.device


def test_a_single_process_sends_nothing_and_counts_nothing() -> None:
    with StatsReducer() as reducer:
        reducer({"a": 1.0})
        counted = reducer.counters
    assert (counted.calls, counted.collectives, counted.payload_bytes) == (1, 0, 0)


def test_the_host_of_the_store_is_killed() -> None:
    for rank, found in enumerate(run_ranks(runs.killed_store_host, 3)):
        if rank == 0:
            continue
        kind, missing, text, again, waited_sec = found.value
        assert (kind, missing, again) == ("RankMissing", (0,), "RankMissing")
        assert "rank 0: the process is gone" in text
        assert "The store, which could tell who is missing, does not answer" in text
        assert waited_sec < 15


@pytest.mark.parametrize("count", [1, 1000])
def test_a_reduction_that_nobody_collects_does_not_spoil_the_end_of_the_process(count: int) -> None:
    for _ in range(3):
        assert [(outcome.error, outcome.exit_code) for outcome in run_ranks(runs.left_pending, 2, count)] == [
            (None, 0)
        ] * 2


def test_the_drop_in_and_a_name_that_is_spelled_like_it_are_two(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.names_of_the_drop_in).values() == [{"a": 1.0}] * 2


def test_a_conflict_names_all_ranks_and_the_group(three_ranks: RankPool) -> None:
    group = "the default group of 3 ranks"
    assert (
        three_ranks.run(runs.conflicts_on_six_paths).values()
        == [[((0, 1, 2), "k0", group), ((0, 1, 2), None, group)]] * 3
    )


@pytest.mark.parametrize("weight", [[math.inf, -math.inf], [math.nan, 1.0], [-1.0, 2.0]])
def test_a_weight_at_fault_is_named(weight: list[float]) -> None:
    with pytest.raises(InvalidStats, match=r"the weight is tensor.*is finite and not negative"):
        reduce_stats({"a": 1.0}, torch.tensor(weight, dtype=torch.float64))
    with pytest.raises(InvalidStats, match="a Mean for which the weight is tensor"):
        reduce_stats({"a": Mean(1.0, weight=torch.tensor(weight, dtype=torch.float64))})


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
