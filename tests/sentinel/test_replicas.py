"""Replica digests on real ranks report no equal replicas, and name rank, tensor, element and bit of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats.errors import InvalidStats
from ddpstats.sentinel.replicas import Divergence, Split, running_names
from ddpstats.testing import RankPool, RanksFailed
from tests.guard.tiers import tiers
from tests.sentinel import replicas_runs as runs
from tests.sentinel.replicas_runs import Flip, Plan


def same_on_all(outcomes: list[dict[str, Any]]) -> list[Divergence | None]:
    """Return the divergence of each step, which is the same on every rank. Nothing may be left behind."""
    for outcome in outcomes:
        assert outcome["divergences"] == outcomes[0]["divergences"]
        assert outcome["calls"] == outcomes[0]["calls"]
        assert outcome["left"] == (0, 0)
    divergences: list[Divergence | None] = outcomes[0]["divergences"]
    return divergences


def divergence_of(pool: RankPool, plan: Plan, step: int = 1) -> Divergence:
    """Return the divergence of the step in which the fault was planted; no step before may have one."""
    divergences = same_on_all(pool.run(runs.train, plan).values())
    assert divergences[:step] == [None] * step
    divergence = divergences[step]
    assert divergence is not None
    return divergence


EQUAL = {
    "dropout and batch norm": Plan(),
    "no broadcast of buffers": Plan(ddp={"broadcast_buffers": False}),
    "bucket views and accumulation": Plan(ddp={"gradient_as_bucket_view": True}, micro_batches=2),
    "bfloat16": Plan(dtype=torch.bfloat16),
    "inside of a holder": Plan(wrap="holder"),
    "the module inside": Plan(wrap="inner"),
    "reduced by hand": Plan(wrap="alone"),
    "buffers not expected": Plan(expects=False),
    "buffers copied on one rank only": Plan(meddle="no_copies"),
    "running statistics moved between steps": Plan(meddle="evaluates"),
    "a buffer moved by a pass without gradients": Plan(meddle="moved_mean"),
    "pickled and copied with the hook": Plan(pickles=True),
    "equal bits of NaN": Plan(meddle="nan"),
    "what DDP ignores": Plan(meddle="ddp_ignores", steps=1),
}


QUICK = ("no broadcast of buffers", "bucket views and accumulation", "running statistics moved between steps")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in EQUAL]
)
def test_equal_replicas_are_equal(two_ranks: RankPool, case: str) -> None:
    outcomes = two_ranks.run(runs.train, EQUAL[case]).values()
    assert same_on_all(outcomes) == [None] * EQUAL[case].steps
    assert outcomes[0]["calls"] == ["replica digests"] * EQUAL[case].steps
    assert outcomes[0]["warnings"] == ()


@pytest.mark.parametrize("bit", tiers([0, 31], [30], [22, 23]))
@pytest.mark.parametrize(("kind", "name"), [("parameter", "middle.weight"), ("gradient", "first.bias")])
def test_a_flipped_bit_is_found_with_rank_and_element(three_ranks: RankPool, kind: str, name: str, bit: int) -> None:
    place = 1234 if kind == "parameter" else 17
    plan = Plan(flips=[Flip(1, 2, kind, name, place, bit)])
    divergence = divergence_of(three_ranks, plan)
    assert (divergence.kind, divergence.name, divergence.culprit_ranks) == (kind, name, (2,))
    assert Split.of(divergence.held).groups == ((0, 1), (2,))
    assert not divergence.others
    assert divergence.differing_elements == 1
    assert divergence.element is not None
    assert divergence.element.index == (divmod(place, 40) if kind == "parameter" else (17,))
    assert divergence.element.flipped == (bit,)
    assert "One flipped bit: the hardware of rank 2 is the first suspect." in divergence.message
    assert ("it happened in this step" in divergence.message) == (kind == "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_frozen_parameter_of_one_of_four_ranks_is_named(four_ranks: RankPool, rank: int) -> None:
    plan = Plan(flips=[Flip(1, rank, "parameter", "last.bias", 1, 5)], ddp={"gradient_as_bucket_view": True})
    divergence = divergence_of(four_ranks, plan)
    assert (divergence.kind, divergence.name, divergence.culprit_ranks) == ("parameter", "last.bias", (rank,))


def test_a_flipped_bit_of_a_buffer_is_found(three_ranks: RankPool) -> None:
    plan = Plan(flips=[Flip(1, 2, "buffer", "scale", 7, 31)], ddp={"broadcast_buffers": False}, wrap="holder")
    divergence = divergence_of(three_ranks, plan)
    assert (divergence.kind, divergence.name, divergence.culprit_ranks) == ("buffer", "net.module.scale", (2,))
    assert divergence.element is not None
    assert divergence.element.index == (7,)
    assert set(divergence.element.values.values()) == {"1", "-1"}
    assert "`ignore`" in divergence.message


def test_a_buffer_that_ddp_broadcasts_is_compared_after_that(three_ranks: RankPool) -> None:
    plan = Plan(flips=[Flip(1, 2, "buffer", "scale", 7, 31)])
    assert same_on_all(three_ranks.run(runs.train, plan).values()) == [None] * 3


def test_buffers_that_may_differ_are_left_out_by_pattern(two_ranks: RankPool) -> None:
    plan = Plan(meddle="own_scale", ddp={"broadcast_buffers": False})
    divergence = divergence_of(two_ranks, plan)
    assert (divergence.kind, divergence.name, divergence.differing_elements) == ("buffer", "scale", 40)
    outcomes = two_ranks.run(runs.train, replace(plan, ignore=("sc*",))).values()
    assert same_on_all(outcomes) == [None] * 3


def test_two_ranks_are_two_sides(two_ranks: RankPool) -> None:
    plan = Plan(flips=[Flip(1, 1, "parameter", "first.weight", 0, 12)])
    divergence = divergence_of(two_ranks, plan)
    assert divergence.culprit_ranks == ()
    assert Split.of(divergence.held).groups == ((0,), (1,))
    assert "rank 0 against rank 1" in divergence.message
    assert "One flipped bit: the hardware of one of these ranks is the first suspect." in divergence.message
    assert "a third replica would decide, or peer replay" in divergence.message


@pytest.mark.parametrize("meddle", ["noise", "learning_rate"])
def test_software_divergence_points_at_software(three_ranks: RankPool, meddle: str) -> None:
    divergence = divergence_of(three_ranks, Plan(meddle=meddle))
    assert divergence.culprit_ranks == (1,)
    assert divergence.kind == ("gradient" if meddle == "noise" else "parameter")
    assert len(divergence.others) >= 5
    assert "More than one element: software first." in divergence.message
    if meddle == "learning_rate":
        assert divergence.name == "first.weight"


def test_a_damaged_parameter_comes_before_what_it_does_to_gradients(three_ranks: RankPool) -> None:
    flips = [Flip(1, 2, "gradient", "first.weight", 3, 3), Flip(1, 2, "parameter", "middle.weight", 3, 3)]
    divergence = divergence_of(three_ranks, Plan(flips=flips))
    assert (divergence.kind, divergence.name) == ("parameter", "middle.weight")
    assert [kind for kind, *_ in divergence.others] == ["gradient"]


@pytest.mark.slow
def test_two_culprits_in_different_tensors_are_both_named(four_ranks: RankPool) -> None:
    flips = [Flip(1, 3, "parameter", "first.weight", 3, 3), Flip(1, 1, "parameter", "last.weight", 3, 3)]
    divergence = divergence_of(four_ranks, Plan(flips=flips))
    assert divergence.culprit_ranks == (1, 3)
    assert divergence.name == "first.weight"
    assert [kind for kind, *_ in divergence.others] == ["parameter"]


def test_a_bit_of_bfloat16_is_named(three_ranks: RankPool) -> None:
    plan = Plan(dtype=torch.bfloat16, flips=[Flip(1, 0, "parameter", "middle.weight", 801, 14)])
    divergence = divergence_of(three_ranks, plan)
    assert divergence.culprit_ranks == (0,)
    assert divergence.element is not None
    assert (divergence.element.index, divergence.element.flipped, divergence.element.width) == ((20, 1), (14,), 16)
    assert "bit 14." in divergence.message
    assert "middle.weight (bfloat16 [40, 40])" in divergence.message


def test_a_gradient_missing_on_one_rank_is_named(three_ranks: RankPool) -> None:
    divergence = divergence_of(three_ranks, Plan(meddle="no_gradient"))
    assert (divergence.kind, divergence.name, divergence.culprit_ranks) == ("gradient", "middle.bias", (1,))
    assert "  ranks 0, 2: float32 [40]\n  rank 1: none\n" in divergence.message


def test_an_extra_parameter_on_one_rank_is_named(three_ranks: RankPool) -> None:
    plan = Plan(meddle="other_model", wrap="alone", steps=1)
    divergence = divergence_of(three_ranks, plan, 0)
    assert (divergence.kind, divergence.name, divergence.culprit_ranks) == ("parameter", "extra", (1,))
    assert "  ranks 0, 2: no such tensor\n  rank 1: float32 [3]\n" in divergence.message


def once(pool: RankPool, build: str) -> tuple[Divergence | None, dict[str, Any]]:
    outcomes = pool.run(runs.compare_once, build).values()
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]["divergence"], outcomes[0]


def test_running_statistics_of_sync_batch_norm_are_those_of_all_ranks() -> None:
    """It runs on accelerators only, so not here."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True))
    expected = {
        f"{place}.{name}" for place in (0, 2) for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert running_names(model) == expected


@pytest.mark.parametrize("build", ["lazy", "strided", "empty"])
def test_odd_models_are_equal(two_ranks: RankPool, build: str) -> None:
    divergence, outcome = once(two_ranks, build)
    assert divergence is None
    assert outcome["warnings"] == ()


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


def test_other_shapes_and_other_orders_are_named(three_ranks: RankPool) -> None:
    divergence, _ = once(three_ranks, "other_shape")
    assert divergence is not None
    assert "  ranks 0, 2: float32 [2]\n  rank 1: float32 [3]\n" in divergence.message
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


def test_an_error_while_looking_is_raised_on_every_rank(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        two_ranks.run(runs.compare_once, "raising").values()
    assert "of the user's own" in str(failed.value)
    assert str(failed.value).count(f"{InvalidStats.__name__}: ") >= 2
    assert once(two_ranks, "empty")[0] is None  # and the ranks are still in step
