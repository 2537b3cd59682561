"""Programs that reduce their gradients themselves: whose they were is told, or that it is not known; never wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpstats.capture import CaptureVerdict
from ddpstats.testing import RankPool
from tests.capture import own_reduction_runs as runs

NOT_SEEN = ["before_the_node", "behind_the_model"]


def same_on_all(pool: RankPool, *args: object) -> list[CaptureVerdict]:
    first, *others = pool.run(*args).values()  # type: ignore[arg-type]
    assert all(one == first for one in others)
    return list(first)


def assert_told(verdict: CaptureVerdict) -> None:
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", (1,))
    assert "the gradients of rank 1 are not finite, before any reduction" in verdict.message
    assert any(name.startswith("last.") for name in verdict.parameters)
    assert verdict.bundle is not None


def assert_not_known(verdict: CaptureVerdict) -> None:
    assert (verdict.kind, verdict.culprit_ranks, verdict.by_rank) == ("nonfinite", (), {})
    assert "the program had already reduced them" in verdict.message
    assert "Which rank they come from is not known." in verdict.message
    assert "before any reduction" not in verdict.message
    assert verdict.should_skip
    assert verdict.bundle is not None


@pytest.mark.parametrize("bad_step", [0, 1])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", runs.SETUPS)
def test_whose_it_was(two_ranks: RankPool, tmp_path: Path, name: str, order: str, bad_step: int) -> None:
    verdicts = same_on_all(two_ranks, runs.run, name, order, bad_step, str(tmp_path))
    assert [one.kind for one in verdicts] == ["nonfinite" if step == bad_step else "ok" for step in range(3)]
    is_seen = name not in NOT_SEEN and not (name == "each_time" and bad_step == 0)
    assert_told(verdicts[bad_step]) if is_seen else assert_not_known(verdicts[bad_step])
    if name in ("plain", "of_a_copy", "gathered", "on_two_groups", "asynchronous"):
        assert "The gradients of rank 0 were finite." in verdicts[bad_step].message


@pytest.mark.parametrize("name", ["plain", "asynchronous", "each_time", "after_accumulation", "on_the_node", "by_hand"])
def test_in_the_second_micro_batch(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert_told(same_on_all(two_ranks, runs.run, name, "before", 1, str(tmp_path), "alone", 2)[1])


@pytest.mark.parametrize("name", ["plain", "each_time", "after_accumulation", "on_the_node", "by_hand"])
def test_in_the_first_micro_batch(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    """In the second one every rank's gradients hold it."""
    assert_told(same_on_all(two_ranks, runs.run, name, "before", 1, str(tmp_path), "alone", 2, 0)[1])


@pytest.mark.parametrize("name", ["between_layers", "plain"])
@pytest.mark.parametrize("bad_step", [0, 1, 2])
def test_inside_of_ddp(two_ranks: RankPool, tmp_path: Path, name: str, bad_step: int) -> None:
    assert_told(same_on_all(two_ranks, runs.run, name, "before", bad_step, str(tmp_path), "ddp")[bad_step])


@pytest.mark.parametrize("bad_step", [0, 1, 2])
def test_behind_the_model_inside_of_ddp(two_ranks: RankPool, tmp_path: Path, bad_step: int) -> None:
    verdicts = same_on_all(two_ranks, runs.run, "behind_the_model", "before", bad_step, str(tmp_path), "ddp")
    assert_not_known(verdicts[bad_step])


def test_a_hook_that_mends_before_it_reduces(two_ranks: RankPool, tmp_path: Path) -> None:
    assert same_on_all(two_ranks, runs.mended, str(tmp_path))[0].ok
    assert not list(tmp_path.iterdir())


def test_a_hook_that_makes_the_nan_itself(two_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same_on_all(two_ranks, runs.made_by_a_hook, str(tmp_path))[0]
    assert (verdict.culprit_ranks, verdict.parameters) == ((1,), ("last.bias",))


def test_a_sum_that_overflows_in_a_hook(two_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same_on_all(two_ranks, runs.overflowing, str(tmp_path))[0]
    assert (verdict.kind, verdict.culprit_ranks) == ("overflow", ())


def test_both_ranks_have_their_own(two_ranks: RankPool, tmp_path: Path) -> None:
    assert same_on_all(two_ranks, runs.both, str(tmp_path))[0].culprit_ranks == (0, 1)


def test_ranks_that_did_not_take_part_are_fine(four_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same_on_all(four_ranks, runs.of_one_rank_of_four, str(tmp_path))[0]
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", ())
    assert "gradients are not finite on ranks 2, 3" in verdict.message


def test_each_gradient_is_looked_at_by_itself_until_nothing_was_seen_to_communicate(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.looks, False).values() == [[[1] * 4, [4]]] * 2
    assert two_ranks.run(runs.looks, True).values() == [[[1] * 4] * 2] * 2


def test_hooks_do_and_see_what_they_did_without_a_capture(two_ranks: RankPool, tmp_path: Path) -> None:
    plain = two_ranks.run(runs.untouched, False, str(tmp_path)).values()
    watched = two_ranks.run(runs.untouched, True, str(tmp_path)).values()
    for (gradients, hooks), (expected, _) in zip(watched, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
        assert hooks == [["mean_of"]] * 4
