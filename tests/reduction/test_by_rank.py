"""``per_rank=True`` gives what each rank held, exactly, for one collective more, and nothing without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import ConfigError, InvalidStats, Max, Min, ProtocolMismatch, StatsReducer, Sum
from ddpstats._ranks.gather import gather_trees
from ddpstats._reduction import reduce
from ddpstats.testing import PerRank, RankPool, ThreadGroup, count_collectives, run_threads
from tests.capabilities import orders_groups

t = torch.tensor


def by_rank(stats: Any, weight: Any = 1.0, **settings: Any) -> dict[str, tuple[Any, ...]]:
    reduced = ddpstats.reduce_stats(stats, weight, per_rank=True, **settings)
    return {name: held.values for name, held in reduced.flat_by_rank().items()}


def agreed(pool: RankPool, stats: list[Any], weights: list[Any], **settings: Any) -> dict[str, tuple[Any, ...]]:
    """Return the one answer of all ranks. They reduce twice: with a new layout, and with a known one."""
    for _ in range(2):
        answers = pool.run(by_rank, PerRank(stats), PerRank(weights), **settings).values()
        assert len(set(map(repr, answers))) == 1, answers
    return dict(answers[0])


# -- values -----------------------------------------------------------------------------------------------------------


def test_each_value_comes_through_to_the_bit(two_ranks: RankPool) -> None:
    held = [0.1, -0.0, 5e-324, 1e200, 1 / 3, 2**53, -7]
    stats: list[dict[str, Any]] = [
        {f"k{i}": value for i, value in enumerate(held)} | {"sum": Sum(-0.0), "max": Max(-0.0)},
        {"k0": t(0.1), "more": t(0.1, dtype=torch.float64), "sum": Sum(0.1)},
    ]
    for weights in ([3.3, 0.7], [1e-3, 1e100], [0.3, 1e-100]):
        by_path = agreed(two_ranks, stats, weights, name="bits")
        assert [repr(by_path[f"k{i}"][0]) for i in range(len(held))] == [repr(float(value)) for value in held]
        assert repr(by_path["sum"]) == "(-0.0, 0.1)"
        assert repr(by_path["max"]) == "(-0.0, None)"
        assert by_path["k0"][1] == t(0.1).item()
        assert (by_path["more"], by_path["k1"][1]) == ((None, 0.1), None)


# -- ranks ------------------------------------------------------------------------------------------------------------


def in_a_group_of_another_order() -> list[Any]:
    group, rank = dist.new_group([2, 0, 1], sort_ranks=False), dist.get_rank()
    held = ddpstats.reduce_stats({"a": float(rank)}, group=group, per_rank=True).by_rank["a"]
    with pytest.raises(InvalidStats) as refused:
        ddpstats.reduce_stats({"a": "no number" if rank == 2 else 1.0}, group=group)
    return [held.ranks, held.values, gather_trees(rank, name="in order", group=group), str(refused.value)]


@orders_groups
def test_ranks_are_in_the_order_of_their_group(three_ranks: RankPool) -> None:
    for ranks, values, trees, refused in three_ranks.run(in_a_group_of_another_order).values():
        assert (ranks, values, trees) == ((2, 0, 1), (2.0, 0.0, 1.0), [2, 0, 1])
        assert "rank 2 (group rank 0)" in refused


def in_a_subgroup(value: float) -> tuple[Any, ...] | None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    held = ddpstats.reduce_stats({"a": value, f"of {value}": 1.0}, group=group, per_rank=True).by_rank["a"]
    return held.values, held.ranks, held.min_rank, held.max_rank, held.worst(1)


def test_ranks_are_global_in_a_subgroup(three_ranks: RankPool) -> None:
    want = (5.0, -1.0), (0, 2), 2, 0, ((0, 5.0),)
    assert three_ranks.run(in_a_subgroup, PerRank([5.0, 0.0, -1.0])).values() == [want, None, want]


# -- what was not asked for, and what it costs ------------------------------------------------------------------------


def cost(reducer: StatsReducer, stats: Any) -> tuple[int, int, int]:
    """Return collectives as counted by the reducer and by torch, and bytes, of a call whose paths are known."""
    for _ in range(2):
        reducer(stats)
    before = reducer.counters
    with count_collectives() as seen:
        reducer(stats)
    after = reducer.counters
    return after.collectives - before.collectives, seen.total, after.payload_bytes - before.payload_bytes


def costs(stats: Any) -> list[tuple[int, int, int]]:
    """Return the cost of a plain call, of one with ``per_rank`` under its name, and of a plain call again."""
    plain, asking = StatsReducer(name="cost"), StatsReducer(name="cost", per_rank=True)
    return [cost(plain, stats), cost(asking, stats), cost(plain, stats)]


def test_who_does_not_ask_pays_nothing(two_ranks: RankPool) -> None:
    means = {f"k{i}": 1.0 for i in range(100)}
    for before, asking, after in two_ranks.run(costs, means).values():
        assert before == after
        assert before[:2] == (1, 1)
        assert asking == (2, 2, before[2] + 9 * 100)
    for before, asking, after in two_ranks.run(costs, {**means, "hi": Max(1), "lo": Min(1)}).values():
        assert before == after
        assert asking == (3, 3, before[2] + 9 * 102)


def past_the_limit(group: ThreadGroup, limit: int) -> tuple[str, Any, Any]:
    reducer = group.reducer(per_rank=True, name="much")
    with pytest.raises(InvalidStats) as caught:
        reducer({f"k{i}": 1.0 for i in range(limit)})
    with group.reducer(per_rank=True, name="few") as smaller:
        return str(caught.value), caught.value.ranks, smaller({"a": group.rank}).by_rank["a"].values


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reduce, "MAX_GATHERED_BYTES", 3 * 9 * 20)
    return 21


def test_more_than_the_limit_is_an_error_on_every_rank(small_limit: int) -> None:
    """20 slots of 3 ranks; a real one takes 256 MB."""
    answers = run_threads(past_the_limit, 3, small_limit).values()
    assert len({text for text, _, _ in answers}) == 1
    assert "per_rank=True would bring 567 bytes to every rank of 3 threads: 189 of each rank" in answers[0][0]
    assert "name='much'" in answers[0][0]
    assert [values for _, _, values in answers] == [(0.0, 1.0, 2.0)] * 3
    assert answers[0][1] == (0, 1, 2)


# -- ranks that differ ------------------------------------------------------------------------------------------------


def asked_by(per_rank: bool) -> str:
    with StatsReducer(name="differ", per_rank=per_rank, timeout_sec=30) as reducer:
        with pytest.raises(ProtocolMismatch) as caught:
            reducer({"a": 1.0})
        with StatsReducer(name="differ") as plain:
            assert plain({"a": 1.0}).values == {"a": 1.0}
    return str(caught.value)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_ranks_must_all_ask(two_ranks: RankPool, known: bool) -> None:
    if known:
        two_ranks.run(by_rank, {"a": 1.0}, name="differ")
    texts = two_ranks.run(asked_by, PerRank([True, False])).values()
    assert texts[0] == texts[1]
    assert "  rank 0: reduce_stats, name='differ', nonfinite='propagate', per_rank=True\n" in texts[0]
    assert "  rank 1: reduce_stats, name='differ', nonfinite='propagate'\n" in texts[0]


# -- beside it --------------------------------------------------------------------------------------------------------


def started(rank: int) -> tuple[Any, Any]:
    with StatsReducer(name="started", per_rank=True) as reducer:
        stats = {"a": torch.tensor([float(rank)]), "b": {f"of {rank}": float(rank)}}
        pending = reducer.start(stats, weight=2.0)
        first = pending.result()
        second = reducer.start({"a": 1.0 + rank}).result()
    return first.flat_by_rank()["a"].values, second.by_rank["a"].values


def test_started_reductions_give_values_by_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(started, PerRank([0, 1])).values() == [((0.0, 1.0), (1.0, 2.0))] * 2


# -- for loggers ------------------------------------------------------------------------------------------------------


def flat_per_rank(stats: Any) -> dict[str, float]:
    return ddpstats.reduce_stats(stats, name="flat", per_rank=True).flat(per_rank=True)


def test_flat_per_rank_has_min_and_max_with_their_ranks(two_ranks: RankPool) -> None:
    stats = [
        {"loss": 1.0, "l": [math.nan, math.nan]},
        {"loss": -2.0, "l": [3.0, math.nan], "on": ddpstats.Any(True)},
    ]
    extremes = ("", "/min", "/min_rank", "/max", "/max_rank")
    expected = dict(zip([f"loss{extreme}" for extreme in extremes], (-0.5, -2.0, 1, 1.0, 0), strict=True))
    expected |= dict(zip([f"l[0]{extreme}" for extreme in extremes], (math.nan, 3.0, 1, 3.0, 1), strict=True))
    expected |= {"l[1]": math.nan}
    expected |= dict(zip([f"on{extreme}" for extreme in extremes], (1.0, 1.0, 1, 1.0, 1), strict=True))
    for flat in two_ranks.run(flat_per_rank, PerRank(stats)).values():
        assert flat == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_flat_per_rank_that_cannot_be_given_is_an_error() -> None:
    with pytest.raises(ConfigError, match="reduce with per_rank=True"):
        ddpstats.reduce_stats({"loss": 1.0}).flat(per_rank=True)
    with pytest.raises(ConfigError, match="would give 'loss/min' twice"):
        ddpstats.reduce_stats({"loss": 1.0, "loss/min": 2.0}, per_rank=True).flat(per_rank=True)
