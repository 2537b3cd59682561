"""Means of weights and values at the ends of float64 are right to some bits, or the same error on every rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings, strategies as st

from ddpstats import Mean, StatsReducer, Sum, reduce_stats
from ddpstats.errors import InvalidStats, NonFiniteStat
from ddpstats.testing import PerRank, RankPool
from tests.reduction.oracle import exact_mean, is_near

TINY, LARGEST = 5e-324, sys.float_info.max
POLICIES = ("propagate", "skip", "raise")
SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)

ends = st.sampled_from([0.0, TINY, 1e-310, 2.2250738585072014e-308, 1e-200, 0.3, 0.5, 1.0, 3.0, 1e200, 1e308, LARGEST])
numbers = st.one_of(ends, ends.map(float.__neg__), st.floats(allow_nan=False, allow_infinity=False))
weights = st.one_of(ends, st.floats(0, allow_nan=False, allow_infinity=False))
pairs = st.tuples(numbers, weights)


def told(stats: Any, weight: Any = 1.0, **settings: Any) -> tuple[Any, ...] | str:
    try:
        reduced = reduce_stats(stats, weight, **settings)
    except (InvalidStats, NonFiniteStat) as error:
        return f"{type(error).__name__}: {error}"
    return reduced.values, reduced.weights, reduced.nonfinite_ranks


def check(held: Sequence[tuple[float, float]], answers: Sequence[Any], read: Any) -> None:
    """``read(answer)``: the mean and the weight of the path in question."""
    assert len(set(map(repr, answers))) == 1, answers
    total = sum((Fraction(weight) for _, weight in held), Fraction(0))
    if isinstance(answers[0], str):
        assert total > Fraction(LARGEST) * Fraction(999, 1000), answers[0]
        assert answers[0].startswith("InvalidStats: ")
        return
    mean, weight = read(answers[0])
    assert is_near(weight, total, total)
    assert is_near(mean, *exact_mean(held)), (mean, held)


# -- what was wrong ---------------------------------------------------------------------------------------------------

# (value, weight) of each of two ranks, and the mean.
CASES: dict[str, tuple[list[tuple[float, float]], float]] = {
    "a product that vanishes": ([(0.5, TINY), (0.5, TINY)], 0.5),
    "below the normal numbers": ([(1e-155, 1e-160), (3e-155, 1e-160)], 2e-155),
    "a product that overflows": ([(1e308, 10.0), (1e308, 10.0)], 1e308),
    "products that cancel": ([(1e308, 10.0), (-1e308, 10.0)], 0.0),
    "a sum that overflows": ([(1e308, 1.0), (1e308, 1.0)], 1e308),
    "the largest": ([(LARGEST, 0.3), (LARGEST, 0.3)], LARGEST),
    "the largest of either sign": ([(LARGEST, 3.0), (-LARGEST, 1.0)], LARGEST / 2),
    "a heavy and a light rank": ([(1.0, 1e307), (1e308, 1e-308)], 1.0),
    "a light large value": ([(1e300, TINY), (1e300, TINY)], 1e300),
    "minus zero": ([(-0.0, TINY), (-0.0, 1e308)], 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_means_at_the_ends_of_float64(two_ranks: RankPool, case: str) -> None:
    held, want = CASES[case]
    parts = PerRank([{"x": value, "y": 1.0} for value, _ in held])
    answers = two_ranks.run(told, parts, PerRank([weight for _, weight in held]), name="ends").values()
    assert answers[0] == answers[1]
    values, _, nonfinite = answers[0]
    assert values == {"x": pytest.approx(want, rel=1e-14, abs=0), "y": pytest.approx(1.0)}
    assert nonfinite == {"x": 0, "y": 0}


def test_a_sum_is_infinite_only_where_it_is_too_large(three_ranks: RankPool) -> None:
    for held, want in (([1e308, 1e308, -1e308], 1e308), ([LARGEST, LARGEST, 1.0], math.inf)):
        answers = three_ranks.run(told, PerRank([{"x": Sum(value)} for value in held])).values()
        assert [answer[0] for answer in answers] == [{"x": want}] * 3


# -- weights that are too heavy together ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_overflow_together_are_an_error(two_ranks: RankPool, policy: str) -> None:
    answers = two_ranks.run(told, {"x": 1.0}, 1e308, nonfinite=policy, name="heavy").values()
    assert answers[0] == answers[1]
    assert answers[0].startswith("InvalidStats: the weights add up to more than a float64 can hold")
    assert two_ranks.run(told, {"x": 1.0}, 1.0, nonfinite=policy, name="heavy").values()[0][0] == {"x": 1.0}


def test_weights_of_one_path_that_overflow_together_are_an_error(two_ranks: RankPool) -> None:
    answers = two_ranks.run(told, {"a": {"x": Mean(1.0, 1e308)}, "y": 1.0}).values()
    assert answers[0] == answers[1]
    assert answers[0].startswith("InvalidStats: the weights of 'a/x' add up")


# -- more paths than all ranks can have of each other ------------------------------------------------------------------


def too_many(value: float, weight: float) -> Any:
    stats: dict[str, Any] = {f"a rather long name of the path with the number {i}": 1.0 for i in range(20_000)}
    return told(stats | {"x": Mean(value, weight)}, name="many")


@pytest.mark.slow
def test_a_large_layout_is_right_or_refused(two_ranks: RankPool) -> None:
    for value, weight in ((0.5, TINY), (1e308, 1.0)):
        answers = two_ranks.run(too_many, value, weight, timeout_sec=60).values()
        assert answers[0] == answers[1]
        assert answers[0].startswith("InvalidStats: ")
        assert "too large or too small to be added up" in answers[0]
        assert "'x'" in answers[0]


# -- what it costs ----------------------------------------------------------------------------------------------------


def costs(calls: Sequence[tuple[float, float]]) -> list[int]:
    found = []
    with StatsReducer(name="costs", group=dist.new_group()) as reducer:
        reducer({"x": 1.0})
        for value, weight in calls:
            before = reducer.counters.collectives
            reducer({"x": value}, weight)
            found.append(reducer.counters.collectives - before)
    return found


def test_it_costs_one_collective_more_and_only_where_it_is_needed(two_ranks: RankPool) -> None:
    calls = [
        (0.5, TINY),
        (0.5, 0.5),
        (0.0, 0.5),
        (1e-300, 0.5),
        (1e308, 1.0),
        (TINY, 8.0),
        (math.inf, 2.0),
        (0.0, TINY),
    ]
    assert two_ranks.run(costs, calls).values() == [[2, 1, 1, 1, 2, 1, 1, 1]] * 2


# -- any floats -------------------------------------------------------------------------------------------------------


def own_pair(held: Sequence[tuple[float, float]], policy: str, kind: str) -> Any:
    value, weight = held[dist.get_rank()]
    if kind == "call":
        return told({"x": value, "z": 0.0}, weight, nonfinite=policy, name="any")
    if kind == "own":
        return told({"x": Mean(value, weight), "z": 0.0}, 1.0, nonfinite=policy, name="any own")
    tensor = torch.tensor([value, 0.25], dtype=torch.float64)
    return told({"x": tensor, "z": 0.0}, torch.tensor([weight, 0.0], dtype=torch.float64), nonfinite=policy)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(held=st.tuples(pairs, pairs), policy=st.sampled_from(POLICIES), kind=st.sampled_from(["call", "own", "vector"]))
@example(held=((1.0, 1e308), (2.0, 1e308)), policy="raise", kind="call")
@example(held=((LARGEST, 0.7), (LARGEST, 0.7)), policy="raise", kind="own")
def test_means_on_real_ranks_are_those_of_exact_fractions(
    two_ranks: RankPool, held: Sequence[tuple[float, float]], policy: str, kind: str
) -> None:
    answers = two_ranks.run(own_pair, held, policy, kind).values()
    check(held, answers, lambda answer: (answer[0]["x"], answer[1]["x"]))
