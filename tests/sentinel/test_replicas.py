"""Replica digests on real ranks report no equal replicas, and name rank, tensor, element and bit of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from ddpstats.sentinel.replicas import Divergence, running_names
from ddpstats.testing import BitFlip, RankPool
from tests.sentinel import replicas_runs as runs
from tests.sentinel.sentinel_runs import Plan, alarm_of, assert_quiet, trained

OPTIONS: dict[str, Any] = {"mode": 2, "digest_every_steps": 1}
OWN_BUFFERS = {"broadcast_buffers": False}


def divergence_of(pool: RankPool, plan: Plan, step: int = 1) -> tuple[tuple[int, ...], str]:
    """Return the culprits and the text of the step in which the fault was planted; no step before may have one."""
    plan.options = {**OPTIONS, **plan.options}
    alarm_step, layers, culprits, text = alarm_of(trained(pool, plan))
    assert (alarm_step, layers) == (step, ("replica digests",))
    return culprits, text


EQUAL = {
    "no broadcast of buffers": Plan(ddp=OWN_BUFFERS),
    "bucket views and accumulation": Plan(wrap="view", micro_batches=2),
    "the module inside": Plan(wrap="inside"),
    "a rank without a forward pass": Plan(
        steps=2, wrap="alone", step_fn=runs.without_forward_on_rank_1, after_backward=runs.reduce_by_hand
    ),
    "evaluated inside of DDP between steps": Plan(step_fn=runs.after_an_evaluation_of_the_module_inside),
    "a buffer moved by a pass without gradients": Plan(step_fn=runs.after_a_pass_without_gradients),
    "equal bits of NaN": Plan(after_backward=runs.nan_in_the_last_step),
    "what DDP ignores": Plan(steps=1, prepare=runs.ignored_by_ddp),
}
QUICK = ("no broadcast of buffers", "bucket views and accumulation", "evaluated inside of DDP between steps")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in EQUAL]
)
def test_equal_replicas_are_equal(two_ranks: RankPool, case: str) -> None:
    plan = replace(EQUAL[case], options=OPTIONS, steps=min(EQUAL[case].steps, 3))
    outcomes = trained(two_ranks, plan)
    assert_quiet(outcomes, plan.steps)
    assert [outcome.warnings for outcome in outcomes] == [[], []]


def test_a_flipped_bit_of_a_frozen_parameter_is_found(three_ranks: RankPool) -> None:
    flip = BitFlip("head.bias", "weight", element=1, bit=31, step=1, rank=2)
    culprits, text = divergence_of(three_ranks, Plan(prepare=runs.freeze, flips=[flip]))
    assert culprits == (2,)
    assert "first in parameter head.bias (float32 [11]): rank 2 against ranks 0, 1." in text
    assert "First element [1]:" in text
    assert "They differ in bit 31.\nNo other element of this tensor differs.\nNo other tensor differs." in text
    assert "One flipped bit: the hardware of rank 2 is the first suspect." in text
    assert "it happened in this step" not in text


def test_a_flipped_bit_of_a_gradient_happened_in_this_step(three_ranks: RankPool) -> None:
    flip = BitFlip("head.bias", "reduced_gradient", element=1, bit=3, step=1, rank=2)
    culprits, text = divergence_of(three_ranks, Plan(flips=[flip]))
    assert culprits == (2,)
    assert "first in gradient head.bias" in text
    assert "it happened in this step" in text


SIGN_OF_A_BUFFER = BitFlip("scale", "weight", element=7, bit=31, step=1, rank=2)  # after the copy for this step


def test_a_flipped_bit_of_a_buffer_is_found(three_ranks: RankPool) -> None:
    plan = Plan(flips=[SIGN_OF_A_BUFFER], ddp=OWN_BUFFERS, wrap="holder")
    culprits, text = divergence_of(three_ranks, plan, step=2)
    assert culprits == (2,)
    assert "first in buffer net.module.scale" in text
    assert "First element [7]:\n  ranks 0, 1: 1  0x3f800000\n  rank 2: -1  0xbf800000\n" in text
    assert "`ignore`" in text


def test_a_buffer_that_ddp_broadcasts_is_compared_after_that(three_ranks: RankPool) -> None:
    assert_quiet(trained(three_ranks, Plan(options=OPTIONS, flips=[SIGN_OF_A_BUFFER], steps=3)), 3)


def test_buffers_that_may_differ_are_left_out_by_pattern(two_ranks: RankPool) -> None:
    plan = Plan(ddp=OWN_BUFFERS, after_backward=runs.own_scale, steps=3)
    _, text = divergence_of(two_ranks, plan)
    assert "first in buffer scale" in text
    assert "16 of the 16 elements" in text
    plan.options = {**OPTIONS, "ignore": ["sc*"]}
    assert_quiet(trained(two_ranks, plan), 3)


def test_two_ranks_are_two_sides(two_ranks: RankPool) -> None:
    flip = BitFlip("head.weight", "weight", element=0, bit=12, step=1, rank=1)
    culprits, text = divergence_of(two_ranks, Plan(flips=[flip]))
    assert culprits == ()
    assert "rank 0 against rank 1" in text
    assert "One flipped bit: the hardware of one of these ranks is the first suspect." in text
    assert "a third replica would decide, or peer replay" in text


def test_a_damaged_parameter_comes_before_what_it_does_to_gradients(three_ranks: RankPool) -> None:
    flips = [
        BitFlip("embedding.weight", "reduced_gradient", element=3, bit=3, step=1, rank=2),
        BitFlip("head.weight", "weight", element=3, bit=3, step=1, rank=2),
    ]
    _, text = divergence_of(three_ranks, Plan(flips=flips))
    assert "first in parameter head.weight" in text
    assert "Other tensors that differ (1): gradient embedding.weight" in text


@pytest.mark.slow
def test_two_culprits_in_different_tensors_are_both_named(four_ranks: RankPool) -> None:
    flips = [
        BitFlip(name, "weight", element=3, bit=3, step=1, rank=rank)
        for rank, name in ((3, "embedding.weight"), (1, "head.weight"))
    ]
    culprits, text = divergence_of(four_ranks, Plan(flips=flips))
    assert culprits == (1, 3)
    assert "first in parameter embedding.weight" in text
    assert "Other tensors that differ (1): parameter head.weight" in text


def test_a_bit_of_bfloat16_is_named(three_ranks: RankPool) -> None:
    flip = BitFlip("head.weight", "weight", element=33, bit=3, step=1, rank=0)
    culprits, text = divergence_of(three_ranks, Plan(prepare=nn.Module.bfloat16, flips=[flip]))
    assert culprits == (0,)
    assert "head.weight (bfloat16 [11, 16])" in text
    assert "First element [2, 1]:" in text
    assert "They differ in bit 3." in text


def test_a_gradient_missing_on_one_rank_is_named(three_ranks: RankPool) -> None:
    culprits, text = divergence_of(three_ranks, Plan(after_backward=runs.no_gradient_on_rank_1))
    assert culprits == (1,)
    assert "first in gradient head.bias" in text
    assert "  ranks 0, 2: float32 [11]\n  rank 1: none\n" in text
    assert "look for a backward pass, zero_grad() or a frozen parameter on some ranks only" in text


def test_an_extra_parameter_on_one_rank_is_named(three_ranks: RankPool) -> None:
    plan = Plan(wrap="alone", prepare=runs.extra_parameter_on_rank_1, after_backward=runs.reduce_by_hand)
    culprits, text = divergence_of(three_ranks, plan, step=0)
    assert culprits == (1,)
    assert "first in parameter extra" in text
    assert "  ranks 0, 2: no such tensor\n  rank 1: float32 [3]\n" in text


def once(pool: RankPool, build: str) -> tuple[Divergence | None, dict[str, Any]]:
    outcomes = pool.run(runs.compare_once, build).values()
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]["divergence"], outcomes[0]


def test_running_statistics_of_sync_batch_norm_are_those_of_all_ranks() -> None:
    """It runs on accelerators only, so not here."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True))
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert running_names(model) == {f"{index}.{name}" for index in (0, 2) for name in names}


def test_another_order_in_memory_is_no_difference(two_ranks: RankPool) -> None:
    assert once(two_ranks, "strided")[0] is None


def test_a_parameter_that_only_one_rank_has_initialized_is_named(three_ranks: RankPool) -> None:
    divergence, _ = once(three_ranks, "half_lazy")
    assert divergence is not None
    assert (divergence.name, divergence.culprit_ranks) == ("0.weight", (1,))
    assert "  ranks 0, 2: not initialized yet\n  rank 1: float32 [3, 2]\n" in divergence.message


def test_sharded_parameters_are_left_out_with_a_warning_and_the_others_compared(three_ranks: RankPool) -> None:
    divergence, outcome = once(three_ranks, "sharded")
    assert outcome["warnings"] == (
        "2 sharded parameters are not compared with replicas: each rank holds another part of them.",
    )
    assert divergence is not None
    assert (divergence.name, divergence.culprit_ranks) == ("1.weight", (1,))
    assert divergence.element is not None
    assert divergence.element.index == (1, 2)


def test_a_sparse_gradient_is_compared_by_its_values(three_ranks: RankPool) -> None:
    divergence, _ = once(three_ranks, "sparse")
    assert divergence is not None
    assert (divergence.kind, divergence.name, divergence.culprit_ranks) == ("gradient", "0.weight (values)", (1,))


def test_an_element_of_a_large_tensor_is_found_in_few_rounds(three_ranks: RankPool) -> None:
    divergence, outcome = once(three_ranks, "large")
    assert divergence is not None
    assert divergence.element is not None
    assert divergence.element.index == (417, 1002)
    assert divergence.element.values == {0: "0", 1: "1e-30", 2: "0"}
    assert "No other element of this tensor differs." in divergence.message
    assert outcome["calls"] == [
        "replica digests",
        "replica tensors",
        "replica blocks",
        "replica blocks",
        "replica elements",
    ]


def test_another_order_of_parameters_is_named(three_ranks: RankPool) -> None:
    divergence, _ = once(three_ranks, "other_order")
    assert divergence is not None
    assert divergence.culprit_ranks == (1,)
    assert "  ranks 0, 2: first b\n  rank 1: first a\n" in divergence.message


def test_a_rank_that_cannot_copy_what_differs_is_an_error_on_all(two_ranks: RankPool) -> None:
    for text in two_ranks.run(runs.no_room_on_rank_1).values():
        assert "MemoryError: no room for a copy" in text


def test_a_buffer_of_another_shape_may_be_a_cache(three_ranks: RankPool) -> None:
    divergence = three_ranks.run(runs.compare_caches).values()[0]
    assert (divergence.kind, divergence.name) == ("buffer", "cache")
    assert "A buffer that each rank may have for itself, such as a cache" in divergence.message
