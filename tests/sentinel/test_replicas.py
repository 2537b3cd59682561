"""Replicas on real ranks: equal ones are never reported; of others the rank, the tensor, the element and the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats.errors import InvalidStats
from ddpstats.sentinel._divergence import Divergence, Split
from ddpstats.sentinel._replicas import running_names
from ddpstats.testing import RankPool, RanksFailed
from tests.sentinel import replicas_runs as runs
from tests.sentinel.replicas_runs import Flip, Plan


def same_on_all(outcomes: list[dict[str, Any]]) -> list[Divergence | None]:
    """What was found in each step, which every rank must say alike; and nothing may be left behind."""
    for one in outcomes:
        assert one["found"] == outcomes[0]["found"]
        assert one["calls"] == outcomes[0]["calls"]
        assert one["left"] == (0, 0)
    found: list[Divergence | None] = outcomes[0]["found"]
    return found


def the_one(found: list[Divergence | None], step: int) -> Divergence:
    """That of the step in which the fault was planted; none came before."""
    assert found[:step] == [None] * step
    divergence = found[step]
    assert divergence is not None
    return divergence


EQUAL = {
    "dropout and batch norm": Plan(),
    "no broadcast of buffers": Plan(ddp={"broadcast_buffers": False}),
    "unused parameters": Plan(ddp={"find_unused_parameters": True}, branches=True, steps=4),
    "accumulation": Plan(accumulate=3),
    "bucket views": Plan(ddp={"gradient_as_bucket_view": True}),
    "bucket views and accumulation": Plan(ddp={"gradient_as_bucket_view": True}, accumulate=2),
    "static graph": Plan(ddp={"static_graph": True}),
    "bfloat16": Plan(dtype=torch.bfloat16),
    "float64": Plan(dtype=torch.float64),
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


@pytest.mark.parametrize("case", EQUAL)
def test_equal_replicas_are_equal(two_ranks: RankPool, case: str) -> None:
    outcomes = two_ranks.run(runs.train, EQUAL[case]).values()
    assert same_on_all(outcomes) == [None] * EQUAL[case].steps
    assert outcomes[0]["calls"] == ["replica digests"] * EQUAL[case].steps
    assert outcomes[0]["warnings"] == ()


@pytest.mark.parametrize("case", ["dropout and batch norm", "unused parameters", "bucket views and accumulation"])
def test_comparing_changes_nothing_and_draws_nothing(two_ranks: RankPool, case: str) -> None:
    compared = two_ranks.run(runs.train, EQUAL[case]).values()
    alone = two_ranks.run(runs.train, replace(EQUAL[case], compares=False)).values()
    for one, other in zip(compared, alone, strict=True):
        assert one["drawn"] == other["drawn"]
        for kind in ("parameters", "buffers"):
            assert all(torch.equal(a, b) for a, b in zip(one[kind], other[kind], strict=True))


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
@pytest.mark.parametrize(("kind", "name"), [("parameter", "middle.weight"), ("gradient", "first.bias")])
def test_a_flipped_bit_is_found_at_its_rank_and_place(three_ranks: RankPool, kind: str, name: str, bit: int) -> None:
    place = 1234 if kind == "parameter" else 17
    plan = Plan(flips=[Flip(1, 2, kind, name, place, bit)])
    one = the_one(same_on_all(three_ranks.run(runs.train, plan).values()), 1)
    assert (one.kind, one.name, one.culprit_ranks, tuple(one.held)) == (kind, name, (2,), (0, 1, 2))
    assert Split.of(one.held).groups == ((0, 1), (2,))
    assert not one.others
    assert one.differing_elements == 1
    assert one.element is not None
    assert one.element.index == (divmod(place, 40) if kind == "parameter" else (17,))
    assert one.element.flipped == (bit,)
    assert "One flipped bit: the hardware of rank 2 is the first suspect." in one.message
    assert ("it happened in this step" in one.message) == (kind == "gradient")


@pytest.mark.parametrize("rank", [0, 2])
def test_four_ranks_name_the_one(four_ranks: RankPool, rank: int) -> None:
    plan = Plan(flips=[Flip(1, rank, "parameter", "last.bias", 1, 5)], ddp={"gradient_as_bucket_view": True})
    one = the_one(same_on_all(four_ranks.run(runs.train, plan).values()), 1)
    assert (one.kind, one.name, one.culprit_ranks) == ("parameter", "last.bias", (rank,))  # a frozen one


def test_a_flipped_bit_of_a_buffer_is_found(three_ranks: RankPool) -> None:
    plan = Plan(flips=[Flip(1, 2, "buffer", "scale", 7, 31)], ddp={"broadcast_buffers": False})
    one = the_one(same_on_all(three_ranks.run(runs.train, plan).values()), 1)
    assert (one.kind, one.name, one.culprit_ranks) == ("buffer", "scale", (2,))
    assert one.element is not None
    assert one.element.index == (7,)
    assert set(one.element.values.values()) == {"1", "-1"}
    assert "`ignore`" in one.message


def test_a_buffer_that_ddp_broadcasts_is_compared_after_that(three_ranks: RankPool) -> None:
    plan = Plan(flips=[Flip(1, 2, "buffer", "scale", 7, 31)])
    assert same_on_all(three_ranks.run(runs.train, plan).values()) == [None] * 3


def test_buffers_that_may_differ_are_left_out_by_pattern(two_ranks: RankPool) -> None:
    plan = Plan(meddle="own_scale", ddp={"broadcast_buffers": False})
    one = the_one(same_on_all(two_ranks.run(runs.train, plan).values()), 1)
    assert (one.kind, one.name, one.differing_elements) == ("buffer", "scale", 40)
    outcomes = two_ranks.run(runs.train, replace(plan, ignore=("sc*",))).values()
    assert same_on_all(outcomes) == [None] * 3


def test_what_is_ignored_includes_the_gradient(three_ranks: RankPool) -> None:
    flips = [Flip(0, 2, kind, "middle.weight", 3, 3) for kind in ("parameter", "gradient")]
    plan = Plan(steps=1, flips=flips, ignore=("middle.*",))
    assert same_on_all(three_ranks.run(runs.train, plan).values()) == [None]


def test_two_ranks_are_two_sides(two_ranks: RankPool) -> None:
    plan = Plan(flips=[Flip(1, 1, "parameter", "first.weight", 0, 12)])
    one = the_one(same_on_all(two_ranks.run(runs.train, plan).values()), 1)
    assert one.culprit_ranks == ()
    assert Split.of(one.held).groups == ((0,), (1,))
    assert "rank 0 against rank 1" in one.message
    assert "There is no majority" in one.message


@pytest.mark.parametrize("meddle", ["noise", "learning_rate"])
def test_software_divergence_points_at_software(three_ranks: RankPool, meddle: str) -> None:
    outcomes = three_ranks.run(runs.train, Plan(meddle=meddle)).values()
    one = the_one(same_on_all(outcomes), 1)
    assert one.culprit_ranks == (1,)
    assert one.kind == ("gradient" if meddle == "noise" else "parameter")
    assert len(one.others) >= 5
    assert "Many elements: software first." in one.message
    if meddle == "learning_rate":
        assert one.name == "first.weight"


def test_a_damaged_parameter_comes_before_what_it_does_to_gradients(three_ranks: RankPool) -> None:
    flips = [Flip(1, 2, "gradient", "first.weight", 3, 3), Flip(1, 2, "parameter", "middle.weight", 3, 3)]
    one = the_one(same_on_all(three_ranks.run(runs.train, Plan(flips=flips)).values()), 1)
    assert (one.kind, one.name) == ("parameter", "middle.weight")
    assert [kind for kind, *_ in one.others] == ["gradient"]


def test_two_culprits_in_different_tensors_are_both_named(four_ranks: RankPool) -> None:
    flips = [Flip(1, 3, "parameter", "first.weight", 3, 3), Flip(1, 1, "parameter", "last.weight", 3, 3)]
    one = the_one(same_on_all(four_ranks.run(runs.train, Plan(flips=flips)).values()), 1)
    assert one.culprit_ranks == (1, 3)
    assert one.name == "first.weight"
    assert [kind for kind, *_ in one.others] == ["parameter"]


def test_a_bit_of_bfloat16_is_named(three_ranks: RankPool) -> None:
    plan = Plan(dtype=torch.bfloat16, flips=[Flip(1, 0, "parameter", "middle.weight", 801, 14)])
    one = the_one(same_on_all(three_ranks.run(runs.train, plan).values()), 1)
    assert one.culprit_ranks == (0,)
    assert one.element is not None
    assert (one.element.index, one.element.flipped, one.element.width) == ((20, 1), (14,), 16)
    assert "bit 14 (exponent)" in one.message
    assert "middle.weight (bfloat16 [40, 40])" in one.message


def test_zeros_of_other_sign_differ_and_it_is_said(two_ranks: RankPool) -> None:
    one = the_one(same_on_all(two_ranks.run(runs.train, Plan(meddle="zero")).values()), 1)
    assert (one.name, one.differing_elements) == ("middle.bias", 1)
    assert "As numbers 0.0 and -0.0 are equal, as bits they are not." in one.message


def test_a_gradient_missing_on_one_rank_is_named(three_ranks: RankPool) -> None:
    one = the_one(same_on_all(three_ranks.run(runs.train, Plan(meddle="no_gradient")).values()), 1)
    assert (one.kind, one.name, one.culprit_ranks, one.element) == ("gradient", "middle.bias", (1,), None)
    assert "  ranks 0, 2: float32 [40]\n  rank 1: none\n" in one.message


def test_an_extra_parameter_on_one_rank_is_named(three_ranks: RankPool) -> None:
    plan = Plan(meddle="other_model", wrap="alone", steps=1)
    one = the_one(same_on_all(three_ranks.run(runs.train, plan).values()), 0)
    assert (one.kind, one.name, one.culprit_ranks) == ("parameter", "extra", (1,))
    assert "  ranks 0, 2: no such tensor\n  rank 1: float32 [3]\n" in one.message


def test_names_are_those_of_the_holder(three_ranks: RankPool) -> None:
    plan = Plan(wrap="holder", flips=[Flip(1, 2, "parameter", "middle.weight", 0, 1)])
    assert the_one(same_on_all(three_ranks.run(runs.train, plan).values()), 1).name == "net.module.middle.weight"
    plan = Plan(wrap="holder", flips=[Flip(1, 2, "buffer", "scale", 0, 1)], ddp={"broadcast_buffers": False})
    assert the_one(same_on_all(three_ranks.run(runs.train, plan).values()), 1).name == "net.module.scale"


def once(pool: RankPool, build: str) -> tuple[Divergence | None, dict[str, Any]]:
    outcomes = pool.run(runs.compare_once, build).values()
    assert all(one == outcomes[0] for one in outcomes)
    return outcomes[0]["found"], outcomes[0]


def test_running_statistics_of_sync_batch_norm_are_those_of_all_ranks() -> None:
    """It runs on accelerators only, so not here."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True))
    expected = {
        f"{place}.{name}" for place in (0, 2) for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert running_names(model) == expected


@pytest.mark.parametrize("build", ["lazy", "strided", "empty"])
def test_odd_models_are_equal(two_ranks: RankPool, build: str) -> None:
    found, outcome = once(two_ranks, build)
    assert found is None
    assert outcome["warnings"] == ()


def test_a_parameter_that_only_one_rank_has_initialized_is_named(three_ranks: RankPool) -> None:
    found, _ = once(three_ranks, "half_lazy")
    assert found is not None
    assert (found.name, found.culprit_ranks) == ("0.weight", (1,))
    assert "  ranks 0, 2: not initialized yet\n  rank 1: float32 [3, 2]\n" in found.message


def test_sharded_parameters_are_left_out_with_a_warning_and_the_others_compared(three_ranks: RankPool) -> None:
    found, outcome = once(three_ranks, "sharded")
    assert outcome["warnings"] == (
        "2 sharded parameters are not covered by the comparison of replicas: each rank holds another part of them.",
    )
    assert found is not None
    assert (found.name, found.culprit_ranks) == ("1.weight", (1,))
    assert found.element is not None
    assert found.element.index == (1, 2)


def test_a_sparse_gradient_is_compared_by_its_values(three_ranks: RankPool) -> None:
    found, _ = once(three_ranks, "sparse")
    assert found is not None
    assert (found.kind, found.name, found.culprit_ranks) == ("gradient", "0.weight (values)", (1,))


def test_an_element_of_a_large_tensor_is_found_in_few_rounds(three_ranks: RankPool) -> None:
    found, outcome = once(three_ranks, "large")
    assert found is not None
    assert found.element is not None
    assert found.element.index == (417, 1002)
    assert found.element.values == {0: "0.0", 1: "1e-30", 2: "0.0"}
    assert "No other element of this tensor differs." in found.message
    assert outcome["calls"] == [
        "replica digests",
        "replica tensors",
        "replica blocks",
        "replica blocks",
        "replica elements",
    ]


def test_other_shapes_and_other_orders_are_named(three_ranks: RankPool) -> None:
    found, _ = once(three_ranks, "other_shape")
    assert found is not None
    assert "  ranks 0, 2: float32 [2]\n  rank 1: float32 [3]\n" in found.message
    found, _ = once(three_ranks, "other_order")
    assert found is not None
    assert found.culprit_ranks == (1,)
    assert "  ranks 0, 2: parameter b at this place\n  rank 1: parameter a at this place\n" in found.message


@pytest.mark.parametrize("which", ["flattened", "_pieces"])
def test_a_rank_that_cannot_copy_what_differs_tells_all(two_ranks: RankPool, which: str) -> None:
    for text in two_ranks.run(runs.fail_on_one_rank, which).values():
        assert "MemoryError: no room for a copy" in text


def test_a_buffer_of_another_shape_may_be_a_cache(three_ranks: RankPool) -> None:
    found = three_ranks.run(runs.compare_caches).values()[0]
    assert (found.kind, found.name) == ("buffer", "cache")
    assert "A buffer of another shape may be a cache that each rank has for itself" in found.message


def test_an_error_while_looking_is_raised_on_every_rank(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        two_ranks.run(runs.compare_once, "raising").values()
    assert "of the user's own" in str(failed.value)
    assert str(failed.value).count(f"{InvalidStats.__name__}: ") >= 2
    assert once(two_ranks, "empty")[0] is None  # and the ranks are still in step
