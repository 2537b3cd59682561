"""Ranks come to one verdict: with threads, where one rank has labels, and where the store is gone."""

from __future__ import annotations

import pytest

from ddpstats.guard.group import GuardMode
from ddpstats.guard.verdicts import ends_by_timeout, is_broken
from ddpstats.testing import RankPool, run_ranks
from tests.guard import verdict_runs as runs
from tests.guard.tiers import tiers


def test_threads_of_two_groups_do_not_take_one_verdict_for_two() -> None:
    assert run_ranks(runs.two_threads, 2, 40, timeout_sec=60).values() == ["", ""]


@pytest.mark.parametrize(("name", "most"), [("loss", 1), ("loss of step {}", 8)])
def test_place_whose_label_one_rank_lacks_is_not_compared_for_ever(two_ranks: RankPool, name: str, most: int) -> None:
    for verdicts, added in two_ranks.run(runs.label_on_one_rank, 20, name).values():
        assert verdicts <= most
        assert added == 0


def test_helper_that_one_rank_once_called_without_a_name_is_compared_on(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.helper_with_names).values()
    assert first == second
    assert "(number 2 of this group)" in first
    assert "What differs: the label" in first


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_rank_that_comes_when_the_store_is_gone_raises_the_verdict_of_the_others(mode: GuardMode) -> None:
    _, late, _ = run_ranks(runs.killed_before_rank_0_ends, 3, mode, timeout_sec=60)
    assert late.value is not None, late
    assert late.value[:2] == ("RankMissing", (2,)), late.value


@pytest.mark.parametrize("mode", tiers(["strict"], ["step"]))
def test_rank_that_loses_the_store_with_rank_0_says_what_it_called_itself(mode: GuardMode) -> None:
    _, *survivors = run_ranks(runs.host_is_killed, 3, mode, timeout_sec=60)
    for rank, survivor in enumerate(survivors, 1):
        assert survivor.value is not None, survivor
        text, shown = survivor.value
        assert f"  rank {rank}: all_reduce(float32[2], sum)\n      at " in text
        assert "\nLook at their output and at the network first.\n" in text
        assert "in find" not in shown
        assert "During handling" not in shown


@pytest.mark.parametrize(
    ("mode", "what", "odd"),
    tiers(
        [("step", "splits", 1)],
        [("step", "splits", 0), *((mode, "stray", odd) for mode in ("step", "strict") for odd in (0, 1))],
    ),
)
def test_survivor_names_both_calls_where_gloo_aborts_the_other_rank(mode: GuardMode, what: str, odd: int) -> None:
    outcomes = run_ranks(runs.aborted, 2, mode, what, odd, timeout_sec=60)
    ends = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert ends, outcomes
    for name, _, text in ends:
        assert name == "CollectiveMismatch", text
        assert "  rank 0: " in text
        assert "  rank 1: " in text
        assert "verdict_runs.py" in text or "DistributedDataParallel" in text


def test_rank_whose_arguments_gloo_refuses_names_both_calls_too() -> None:
    """Gloo refuses them before it asks the other rank, which then waits."""
    for name, _, text in run_ranks(runs.aborted, 2, "step", "refused", 1, timeout_sec=60).values():
        assert name == "CollectiveMismatch", text
        assert "expects [1 x float32, 3 x float32]" in text


def test_rank_that_ends_while_another_waits_in_a_later_collective_is_named_in_seconds() -> None:
    """The other one waits as in DDP, and posts nothing that the last comparison could wait for."""
    for (name, missing, text), took_sec in run_ranks(runs.one_step_less, 2, False, 0.5, timeout_sec=60).values():
        assert (name, missing) == ("RankMissing", (1,)), text
        assert "rank 1: left the guard" in text
        assert took_sec < 20


@pytest.mark.slow
def test_rank_that_ends_while_another_waits_with_a_timeout_is_not_accused() -> None:
    for (name, _, text), _ in run_ranks(runs.one_step_less, 2, True, 5.0, timeout_sec=60).values():
        assert name == "nothing", text


@pytest.mark.parametrize(
    "text",
    [
        "Connection closed by peer [127.0.0.1]:39487",
        "Timed out waiting 4000ms for recv operation to complete",
        "Application timeout caused pair closure",  # gloo, of what is issued after that
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
    ],
)
def test_what_a_backend_says_of_a_lost_rank_is_known(text: str) -> None:
    error = RuntimeError(text)
    try:
        exec("raise error", {"__name__": "torch.distributed", "error": error})
    except RuntimeError:
        assert is_broken(error)
    assert not is_broken(RuntimeError(text))  # the program has made it


ABORTED = "NCCL communicator was aborted on rank 0."


@pytest.mark.parametrize(
    ("text", "is_timeout"),
    [
        ("Rank 0 failed to pass monitoredBarrier in 1000 ms", True),
        (ABORTED, False),
        (f"{ABORTED} Original reason for failure was: ncclRemoteError: A call failed", False),
        (f"{ABORTED} Original reason for failure was: Watchdog caught collective operation timeout: WorkNCCL(", True),
        (f"{ABORTED} Original reason for failure was: NCCL error: ncclUnhandledCudaError", False),
        ("shape mismatch", False),
    ],
)
def test_whether_a_collective_that_fails_at_once_has_timed_out(text: str, is_timeout: bool) -> None:
    """Where it has, the program gets torch's error; where a rank is lost, the guard names it."""
    assert ends_by_timeout(text) == is_timeout
