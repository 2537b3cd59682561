"""Micro-batches repeated by peers: what is found, and what is no fault."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.testing import BitFlip, RankPool
from tests.sentinel import sentinel_runs as runs
from tests.sentinel.sentinel_runs import Plan, alarm_of, trained

OPTIONS: dict[str, Any] = {"mode": 2, "replay_every_steps": 2, "replay_fn": runs.step_fn}


def gradient_flip(step: int, rank: int, *, sticky: bool = False) -> BitFlip:
    return BitFlip("blocks.0.up.weight", "gradient", element=5, bit=20, step=step, rank=rank, sticky=sticky)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(steps=6), {}),
        (Plan(steps=6, micro_batches=3), {}),
        (Plan(steps=6, zero=True), {}),
        (Plan(steps=6, step_fn=runs.autocast_step), {"replay_fn": runs.autocast_step}),
        (Plan(steps=6, wrap="view", micro_batches=2, zero=True), {}),
        (Plan(steps=6, wrap="static"), {}),
        (Plan(steps=6), {"detector": "v3"}),
    ],
    ids=["plain", "accumulated", "zeroed", "bf16 autocast", "bucket view", "static graph", "v3"],
)
def test_equal_ranks_agree_bit_for_bit(three_ranks: RankPool, plan: Plan, options: dict[str, Any]) -> None:
    plan.options = {**OPTIONS, **options}
    for outcome in trained(three_ranks, plan):
        assert all(verdict.ok for verdict in outcome.verdicts)
        assert len(outcome.verdicts) == 6
        assert outcome.warnings == []  # no noise either


@pytest.mark.parametrize("step", [1, 3], ids=["at the first time", "later"])
@pytest.mark.parametrize("sticky", [False, True])
def test_the_rank_that_computes_wrong_is_named(four_ranks: RankPool, step: int, sticky: bool) -> None:
    plan = Plan(options=OPTIONS, flips=[gradient_flip(step, 3, sticky=sticky)])
    found_at, layers, culprits, text = alarm_of(trained(four_ranks, plan))
    assert (found_at, layers, culprits) == (step, ("peer replay",), (3,))
    often = "Rank 3 is wrong each time" if sticky else "Rank 3 was wrong once and right once"
    assert often in text


def test_two_ranks_and_a_transient_fault_need_no_third_one(two_ranks: RankPool) -> None:
    _, _, culprits, text = alarm_of(trained(two_ranks, Plan(options=OPTIONS, flips=[gradient_flip(3, 1)])))
    assert culprits == (1,)
    assert "the micro-batch of rank 1, run 4 times" in text


def test_two_ranks_and_a_sticky_fault_cannot_be_told_apart_and_the_text_says_so(two_ranks: RankPool) -> None:
    _, _, culprits, text = alarm_of(trained(two_ranks, Plan(options=OPTIONS, flips=[gradient_flip(2, 1, sticky=True)])))
    assert culprits == ()
    assert "a third rank would have to decide" in text


def test_a_faulty_checker_is_not_taken_for_a_faulty_owner(four_ranks: RankPool) -> None:
    """Rank 2 is wrong only while it repeats rank 1's micro-batch."""
    plan = Plan(options={**OPTIONS, "replay_fn": runs.wrong_on_rank_2_when_repeating})
    _, _, culprits, text = alarm_of(trained(four_ranks, plan))
    assert culprits == (2,)
    assert "Rank 2 is wrong each time" in text


@pytest.mark.parametrize(
    ("replay_fn", "words"),
    [
        (runs.another_step, "replay_fn is not the step that was trained"),
        (runs.raising_step, "rank 1: ValueError: not on this rank"),
        (runs.communicating_step, "replay_fn communicates (all_reduce), and only one rank runs it here"),
        (runs.float_step, "replay_fn must return the loss, a tensor of one element, and it returned a float"),
        (runs.detached_step, "a loss that no parameter has a part in"),
    ],
    ids=["another step", "raises", "communicates", "returns a float", "detached"],
)
def test_a_step_that_cannot_be_repeated_is_an_error_on_every_rank(
    three_ranks: RankPool, replay_fn: Any, words: str
) -> None:
    texts = three_ranks.run(runs.error_of, {**OPTIONS, "replay_fn": replay_fn}).values()
    assert len(set(texts)) == 1
    assert words in texts[0]


def test_a_batch_that_cannot_be_sent_is_named(two_ranks: RankPool) -> None:
    texts = two_ranks.run(runs.error_of, OPTIONS, runs.with_an_object).values()
    assert texts[0] == texts[1]
    assert "batch['thing'] is of type object" in texts[0]


def test_autocast_around_the_loss_is_part_of_the_step(two_ranks: RankPool) -> None:
    texts = two_ranks.run(runs.error_of, OPTIONS, None, runs.autocast_step).values()
    assert texts[0] == texts[1]
    assert "twice the same gradients, and others than in the step" in texts[0]
    assert "under the same autocast" in texts[0]


def test_a_batch_that_is_changed_in_place_is_copied_from_then_on(two_ranks: RankPool) -> None:
    options = {**OPTIONS, "replay_every_steps": 1, "replay_fn": runs.changing_step}
    assert two_ranks.run(runs.error_of, options, runs.with_a_count, runs.changing_step).values() == ["none"] * 2


def test_a_step_with_noise_of_its_own_is_measured_and_is_no_fault(three_ranks: RankPool) -> None:
    plan = Plan(options={**OPTIONS, "replay_fn": runs.noisy_step}, step_fn=runs.noisy_step)
    for outcome in trained(three_ranks, plan):
        assert all(verdict.ok for verdict in outcome.verdicts)
        (warning,) = outcome.warnings
        assert "does not repeat itself bit for bit" in warning
        assert "torch.use_deterministic_algorithms(True)" in warning


def test_noise_hides_small_faults_and_not_large_ones(three_ranks: RankPool) -> None:
    flip = BitFlip("blocks.0.up.weight", "gradient", element=5, bit=30, step=3, rank=1)
    plan = Plan(options={**OPTIONS, "replay_fn": runs.noisy_step}, step_fn=runs.noisy_step, flips=[flip])
    _, _, culprits, text = alarm_of(trained(three_ranks, plan))
    assert culprits == (1,)
    assert "a transient fault" in text


def test_without_micro_batch_there_is_a_warning_and_no_alarm(two_ranks: RankPool) -> None:
    for outcome in trained(two_ranks, Plan(options=OPTIONS, keeps_context=False)):
        assert all(verdict.ok for verdict in outcome.verdicts)
        assert any("put `with sentinel.micro_batch(batch):`" in one for one in outcome.warnings)


def test_a_rank_without_a_batch_still_takes_part(three_ranks: RankPool) -> None:
    for verdicts in three_ranks.run(runs.one_rank_without_batches, OPTIONS).values():
        assert [verdict.ok for verdict in verdicts] == [True] * 4


def test_batches_that_do_not_all_fit_take_turns(three_ranks: RankPool) -> None:
    """With room for one batch, a rank's fault is found when it is its turn."""
    found = three_ranks.run(runs.with_little_room, [gradient_flip(step, 1) for step in (3, 5, 7)]).values()
    assert found == [[3]] * 3  # turns: rank 0 at step 1, rank 1 at step 3, rank 2 at step 5, rank 0 at step 7


def test_buffers_that_differ_travel_with_the_batch(two_ranks: RankPool) -> None:
    """Without broadcast each rank's batch norm has statistics of its own; in eval mode gradients depend on them."""
    for verdicts in two_ranks.run(runs.own_buffers_in_eval, OPTIONS).values():
        assert [verdict.ok for verdict in verdicts] == [True] * 4


def test_gradients_that_are_left_are_not_taken_for_the_micro_batchs(two_ranks: RankPool) -> None:
    """Never zeroed: .grad is the sum over steps, which no repetition of one micro-batch gives."""
    for verdicts in two_ranks.run(runs.never_zeroed, OPTIONS).values():
        assert [verdict.ok for verdict in verdicts] == [True] * 4


def test_a_rerun_leaves_gradients_buffers_and_random_state(two_ranks: RankPool) -> None:
    for unchanged in two_ranks.run(runs.around_a_rerun, OPTIONS).values():
        assert unchanged == {"gradients": True, "buffers": True, "random": True, "identity": True}
