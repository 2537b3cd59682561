"""Any stats on any ranks, against plain Python: 2, 3 and 4 real gloo ranks, and 64 threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st

import ddpstats
from ddpstats.errors import NonFiniteStat
from ddpstats.testing import PerRank, RankPool, ThreadGroup, run_threads
from ddpstats.testing.strategies import RankStats, uneven_stats
from tests.reduction import reduce_pairs
from tests.reduction.oracle import expected, expected_by_rank, same

POLICIES = ("propagate", "skip", "raise")
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@pytest.fixture(scope="module", params=[2, 3, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, RankPool]]:
    with RankPool(request.param, timeout_sec=30) as ranks:
        yield request.param, ranks


def told(reduced: ddpstats.Reduced) -> dict[str, Any]:
    return {
        "values": reduced.values,
        "weights": reduced.weights,
        "present": reduced.present_ranks,
        "nonfinite": reduced.nonfinite_ranks,
        "flat": reduced.flat(),
        "entries": list(reduced.entries()),
        "total": reduced.total_weight,
        "by_rank": reduced.by_rank,
    }


def reduce_here(part: RankStats, nonfinite: Any, name: str, per_rank: bool = False) -> dict[str, Any] | str:
    try:
        return told(ddpstats.reduce_stats(part.stats, part.weight, name=name, nonfinite=nonfinite, per_rank=per_rank))
    except NonFiniteStat as error:
        return str(error)


def reduce_in_thread(group: ThreadGroup, parts: Sequence[RankStats], nonfinite: Any) -> dict[str, Any] | str:
    part = parts[group.rank]
    try:
        return told(group.reducer(nonfinite=nonfinite, timeout_sec=60)(part.stats, part.weight))
    except NonFiniteStat as error:
        return str(error)


def check(parts: Sequence[RankStats], answers: Sequence[Any], nonfinite: str) -> None:
    # repr tells every bit of a float, the types of containers, and the order of keys
    assert len(set(map(repr, answers))) == 1, answers
    nested, entries = expected(parts, nonfinite)
    if nonfinite == "raise" and any(entry[3] for entry in entries.values()):
        assert isinstance(answers[0], str)
        assert answers[0].startswith("non-finite stats")
        return
    answer = answers[0]
    assert same(answer["values"], nested), (answer["values"], nested)
    assert answer["total"] == sum(part.weight for part in parts)
    assert len(answer["entries"]) == len(entries)
    got = sorted(repr(_rounded(entry[1:4])) for _, entry in answer["entries"])
    assert got == sorted(repr(_rounded(entry[1:])) for entry in entries.values())
    assert len(answer["flat"]) == sum(entry[0] is not None for entry in entries.values())


def _rounded(entry: Sequence[Any]) -> tuple[float, int, int]:
    return round(float(entry[0]), 6), int(entry[1]), int(entry[2])


@settings(max_examples=80, deadline=None, suppress_health_check=[*SLOW, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_real_ranks_agree_with_plain_python(pool: tuple[int, RankPool], data: st.DataObject) -> None:
    world_size, ranks = pool
    parts = data.draw(uneven_stats(world_size))
    policy = data.draw(st.sampled_from(POLICIES))
    # One name sees all examples, so that layouts meet what contradicts and replaces them; others are new.
    name = data.draw(st.sampled_from(["all examples", "some", "others"]))
    answers = ranks.run(reduce_here, PerRank(parts), policy, name).values()
    check(parts, answers, policy)


@settings(max_examples=80, deadline=None, suppress_health_check=[*SLOW, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_real_ranks_know_what_each_rank_holds(pool: tuple[int, RankPool], data: st.DataObject) -> None:
    world_size, ranks = pool
    parts = data.draw(uneven_stats(world_size))
    policy = data.draw(st.sampled_from(POLICIES))
    name = data.draw(st.sampled_from(["all examples", "some", "others"]))  # the layouts of plain calls, too
    answers = ranks.run(reduce_here, PerRank(parts), policy, name, per_rank=True).values()
    check(parts, answers, policy)
    if not isinstance(answers[0], str):
        assert same(spelled(answers[0]["by_rank"]), expected_by_rank(parts, policy)), answers[0]["by_rank"]


def spelled(nested: Any) -> Any:
    """With the repr of the values of all ranks in place of a `RankValues`: it tells every bit but those of a NaN."""
    if isinstance(nested, ddpstats.RankValues):
        return repr(nested.values)
    if isinstance(nested, dict):
        return type(nested)((key, spelled(value)) for key, value in nested.items())
    if isinstance(nested, list | tuple):
        return type(nested)(spelled(value) for value in nested)
    return nested


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(parts=uneven_stats(64, max_depth=2), policy=st.sampled_from(POLICIES))
def test_64_threads_agree_with_plain_python(parts: list[RankStats], policy: str) -> None:
    check(parts, run_threads(reduce_in_thread, 64, parts, policy).values(), policy)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(parts=uneven_stats(1), policy=st.sampled_from(POLICIES))
def test_one_process_without_a_group_agrees_with_plain_python(parts: list[RankStats], policy: str) -> None:
    assert not dist.is_initialized()
    check(parts, [reduce_here(parts[0], policy, "alone")], policy)


# -- of any exponents, against fractions: tests/reduction/reduce_pairs.py ---------------------------------------------


def test_real_ranks_against_fractions(pool: tuple[int, RankPool]) -> None:
    """Weights of one and several elements, tensors of all dtypes, markers, None, lists, and keys that come and go."""
    world_size, ranks = pool
    for first in range(1000 * world_size, 1000 * world_size + 480 // world_size, 40):
        reduce_pairs.check_many(reduce_pairs.of_pool(ranks, "pairs"), world_size, range(first, first + 40))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_threads_against_fractions(ranks: int) -> None:
    reduce_pairs.check_many(reduce_pairs.of_threads(ranks), ranks, range(10_000 * ranks, 10_000 * ranks + 450 // ranks))


def test_an_answer_that_is_off_by_some_bits_is_not_taken_for_right() -> None:
    def spoilt(seeds: range) -> Sequence[Sequence[Any]]:
        answers = reduce_pairs.of_threads(2)(seeds)
        for told, _ in itertools.chain(*answers):
            if isinstance(told, dict) and told["values"] is not None:
                held = told["values"].items()
                told["values"] = {key: v * (1 + 2.0**-45) if type(v) is float else v for key, v in held}
        return answers

    found = 0
    for seed in range(20):
        try:
            reduce_pairs.check_many(spoilt, 2, range(seed, seed + 1))
        except AssertionError:
            found += 1
    assert found > 5
