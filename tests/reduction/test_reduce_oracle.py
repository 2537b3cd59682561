"""A reduction gives what exact arithmetic in plain Python gives, and every rank gets the same bits.

`window_pairs.Draw` draws the stats fast, with numbers of all kinds; hypothesis draws others, with any Unicode in keys,
and makes a failing example small. The long run over many seeds is benchmarks/test_reduce_oracle.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st

import ddpstats
from ddpstats.testing import RankPool
from ddpstats.testing.strategies import RankStats, uneven_stats
from tests.reduction import reduce_pairs, window_pairs
from tests.reduction.window_pairs import POLICIES, Reduction

SLOW_EXAMPLES = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@pytest.mark.parametrize(("ranks", "seeds"), [(1, 60), (2, 90), (3, 40), (5, 20), (8, 8)])
def test_random_reductions_on_threads_are_exact(ranks: int, seeds: int) -> None:
    reduce_pairs.check_many(reduce_pairs.of_threads(ranks), ranks, range(10_000 * ranks, 10_000 * ranks + seeds))


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_random_reductions_on_real_ranks_are_exact(ranks: int, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[ranks])
    reduce_pairs.check_many(reduce_pairs.of_pool(pool, "pairs"), ranks, range(1000 * ranks, 1000 * ranks + 40))


def test_random_windows_on_two_ranks_are_exact(two_ranks: RankPool) -> None:
    assert window_pairs.check_many(two_ranks, 2, range(150), "pairs") > 700


def test_random_windows_without_tensors_are_exact(two_ranks: RankPool) -> None:
    assert window_pairs.check_many(two_ranks, 2, range(2000, 2040), "numbers", tensors=0.0) > 200


# -- drawn by hypothesis ----------------------------------------------------------------------------------------------


def reduction_of(ranks: Sequence[RankStats], policy: str, per_rank: bool) -> Reduction:
    return policy, per_rank, [(rank.stats, rank.weight) for rank in ranks]


@settings(max_examples=50, suppress_health_check=[*SLOW_EXAMPLES, HealthCheck.function_scoped_fixture])
@given(
    ranks=uneven_stats(2),
    policy=st.sampled_from(POLICIES),
    per_rank=st.booleans(),
    # One name sees all examples, so that layouts meet what contradicts and replaces them; others are new.
    name=st.sampled_from(["all examples", "some", "others"]),
)
def test_drawn_stats_on_real_ranks_are_reduced_exactly(
    two_ranks: RankPool, ranks: list[RankStats], policy: str, per_rank: bool, name: str
) -> None:
    reduction = reduction_of(ranks, policy, per_rank)
    reduce_pairs.check_one(reduction, two_ranks.run(reduce_pairs.one_on_this_rank, reduction, name).values())


@settings(max_examples=60, suppress_health_check=SLOW_EXAMPLES)
@given(ranks=uneven_stats(1), policy=st.sampled_from(POLICIES), per_rank=st.booleans())
def test_drawn_stats_without_a_process_group_are_reduced_exactly(
    ranks: list[RankStats], policy: str, per_rank: bool
) -> None:
    assert not dist.is_initialized()
    reduction = reduction_of(ranks, policy, per_rank)
    reduce_pairs.check_one(reduction, [reduce_pairs.reduced(ddpstats.reduce_stats, 0, reduction)])


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_comparison_refuses_an_answer_that_is_off_by_some_bits() -> None:
    def spoilt(seeds: range) -> Sequence[Sequence[Any]]:
        answers = reduce_pairs.of_threads(2)(seeds)
        for answer, _ in itertools.chain(*answers):
            if isinstance(answer, dict) and answer["values"] is not None:
                values = answer["values"].items()
                answer["values"] = {key: v * (1 + 2.0**-45) if type(v) is float else v for key, v in values}
        return answers

    refused = 0
    for seed in range(20):
        try:
            reduce_pairs.check_many(spoilt, 2, range(seed, seed + 1))
        except AssertionError:
            refused += 1
    assert refused > 5
