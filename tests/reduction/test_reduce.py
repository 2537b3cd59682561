"""`reduce_stats` and `StatsReducer` keep what docs/reductions.md says of keys, containers, names, sizes and groups.

What they compute is compared with exact arithmetic in test_reduce_oracle.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsReducer, Sum, reduce_stats
from ddpstats.errors import ConfigError, InvalidStats, NonFiniteStat
from ddpstats.testing import PerRank, RankPool, count_collectives, run_ranks
from tests.reduction.shapes import Point, Scores

t = torch.tensor


def values(stats: Any, weight: Any = 1.0, **settings: Any) -> Any:
    return reduce_stats(stats, weight, **settings).values


def whole(stats: Any, weight: Any = 1.0, **settings: Any) -> tuple[Any, ...]:
    reduced = reduce_stats(stats, weight, **settings)
    return reduced.values, reduced.weights, reduced.present_ranks, reduced.nonfinite_ranks, reduced.total_weight


def agreed(pool: RankPool, stats: list[Any], weight: Any = 1.0, **settings: Any) -> Any:
    """Return the one answer of all ranks, which each reduce their own ``stats``."""
    weights = weight if isinstance(weight, PerRank) else PerRank([weight] * len(stats))
    answers = pool.run(values, PerRank(stats), weights, **settings).values()
    assert len(set(map(repr, answers))) == 1, answers
    return answers[0]


# -- keys, orders, holes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stats", "want"),
    [
        ([{"a": 1.0, "b": 10.0}, {"b": 20.0, "c": 3.0}], {"a": 1.0, "b": 15.0, "c": 3.0}),
        ([{}, {}], {}),
        ([{"a": {}, "b": 1.0}, {"a": [], "b": 3.0}], {"b": 2.0}),
        ([{"a": None}, {}], {"a": None}),
        ([{"a": None}, {"a": {"b": [1.0]}}], {"a": {"b": [1.0]}}),
        ([{"a": [1.0, {}, 3.0]}, {"a": [None, None, 5.0, 7.0]}], {"a": [1.0, None, 4.0, 7.0]}),
        ([[1.0], [2.0, 4.0]], [1.5, 4.0]),
        ([1.0, 3.0], 2.0),
        ([None, 3.0], 3.0),
        ([None, None], None),
        ([{1: 1.0, "1": 10.0}, {"1": 20.0}], {1: 1.0, "1": 15.0}),
        ([{True: 1.0}, {1: 3.0}], {1: 2.0}),
        ([{-5: 1.0}, {10**30: 3.0}], {-5: 1.0, 10**30: 3.0}),
    ],
)
def test_union_of_keys(two_ranks: RankPool, stats: list[Any], want: Any) -> None:
    got = agreed(two_ranks, stats, name=f"union of {stats}")  # a new layout: keys keep the order of an older one
    assert got == want
    assert repr(got) == repr(want)


def test_each_path_has_its_own_denominator(two_ranks: RankPool) -> None:
    stats = [{"both": 1.0, "first": 5.0}, {"both": 4.0}]
    answers = two_ranks.run(whole, PerRank(stats), PerRank([1.0, 2.0])).values()
    assert answers[0][0] == {"both": 3.0, "first": 5.0}
    assert answers[0][1] == {"both": 3.0, "first": 1.0}
    assert answers[0][4] == 3.0


def test_the_result_holds_only_paths_of_this_call(two_ranks: RankPool) -> None:
    assert agreed(two_ranks, [{"a": 1.0}, {"b": 1.0}], name="in turn") == {"a": 1.0, "b": 1.0}
    assert agreed(two_ranks, [{"b": 2.0}, {"b": 4.0}], name="in turn") == {"b": 3.0}
    assert agreed(two_ranks, [{}, {}], name="in turn") == {}


def test_what_this_call_contradicts_is_replaced(two_ranks: RankPool) -> None:
    for stats, want in (
        ({"x": 1.0}, {"x": 1.0}),
        ({"x": {"y": 2.0}}, {"x": {"y": 2.0}}),
        ({"x": Sum(3.0)}, {"x": 6.0}),
        ({"x": [4.0]}, {"x": [4.0]}),
        ({"x": None}, {"x": None}),
        ({"x": (5.0,)}, {"x": (5.0,)}),
    ):
        assert agreed(two_ranks, [stats, stats], name="outdated") == want
        assert agreed(two_ranks, [stats, {}], name="outdated") == (want if want != {"x": 6.0} else {"x": 3.0})


# -- values -----------------------------------------------------------------------------------------------------------


def too_large(stats: Any, weight: Any) -> tuple[str, Any, Any, Any]:
    with StatsReducer(name="large") as reducer:
        with pytest.raises(InvalidStats) as caught:
            reducer(stats, weight)
        return str(caught.value), caught.value.path, caught.value.ranks, reducer({"a": 1.0}).values


@pytest.mark.parametrize(
    ("stats", "weight", "path", "words"),
    [
        ({"a": 1.0, "b": 2e200}, 1.0, "b", "the value is 2e+200; a finite value is at most 1e+200 in size"),
        ({"a": t([1.0, -2e200], dtype=torch.float64)}, t([1.0, 1.0]), "a", "at most 1e+200"),
        ({"a": 1.0, "b": Sum(2e200)}, 1.0, "b", "at most 1e+200"),
        ({"a": 1.0}, 1e101, None, "the weight is 1e+101; a weight is 0, or between 1e-100 and 1e+100"),
        ({"a": Mean(1.0, weight=1e-101)}, 1.0, "a", "a Mean for which the weight is 1e-101"),
    ],
)
def test_values_and_weights_out_of_range_are_refused_on_every_rank(
    two_ranks: RankPool, stats: Any, weight: Any, path: str | None, words: str
) -> None:
    answers = two_ranks.run(too_large, PerRank([{"a": 1.0}, stats]), PerRank([1.0, weight])).values()
    assert answers[0] == answers[1]
    text, *rest = answers[0]
    assert words in text
    assert rest == [path, (1,), {"a": 1.0}]


def test_largest_values_and_weights_do_not_overflow(two_ranks: RankPool) -> None:
    stats = {"mean": 1e200, "sum": Sum(1e200), "inf": math.inf}
    assert agreed(two_ranks, [stats, stats], 1e100) == {"mean": 1e200, "sum": 2e200, "inf": math.inf}
    assert agreed(two_ranks, [{"mean": 1e200}, {"mean": -1.0}], 1e-100)["mean"] == pytest.approx(5e199)


def test_markers(three_ranks: RankPool) -> None:
    def stats(rank: int) -> dict[str, Any]:
        return {
            "tokens": Sum(rank + 1),
            "low": Min(t(float(rank))),
            "high": Max(rank),
            "some": AnyFlag(rank == 2),
            "every": All(rank < 2),
            "ppl": Mean(float(rank), weight=rank),
            "plain": float(rank),
        }

    answers = three_ranks.run(whole, PerRank([stats(rank) for rank in range(3)]), 5.0).values()
    want = {"tokens": 6.0, "low": 0.0, "high": 2.0, "some": True, "every": False, "ppl": 5 / 3, "plain": 1.0}
    assert answers[0][0] == want
    assert type(answers[0][0]["some"]) is bool
    assert answers[0][1] == {"tokens": 3, "low": 3, "high": 3, "some": 3, "every": 3, "ppl": 3.0, "plain": 15.0}
    half = [{"low": Min(-1.5), "some": AnyFlag(False)}, {}, {"high": Max(7), "every": All(1)}]
    assert agreed(three_ranks, half) == {"low": -1.5, "some": False, "high": 7.0, "every": True}


def test_nonfinite_policies(two_ranks: RankPool) -> None:
    stats = [{"x": math.nan, "y": 1.0}, {"x": 2.0, "y": 3.0}]
    spread = two_ranks.run(whole, PerRank(stats), 4.0).values()[0]
    assert math.isnan(spread[0]["x"])
    assert spread[0]["y"] == 2.0
    assert spread[1:4] == ({"x": 8, "y": 8}, {"x": 2, "y": 2}, {"x": 1, "y": 0})
    skipped = two_ranks.run(whole, PerRank(stats), 4.0, nonfinite="skip").values()[0]
    assert skipped == ({"x": 2.0, "y": 2.0}, {"x": 4, "y": 8}, {"x": 1, "y": 2}, {"x": 1, "y": 0}, 8.0)
    errors = two_ranks.run(whole, PerRank(stats), 4.0, nonfinite="raise").errors()
    assert set(map(str, errors.values())) == {
        "non-finite stats (nonfinite='raise') on the default group of 2 ranks:\n  'x': rank 0"
    }
    error = errors[1]
    assert isinstance(error, NonFiniteStat)
    assert (error.path, error.ranks) == ("x", (0,))
    nowhere = [{"x": math.nan}, {"x": math.inf}]
    assert math.isnan(agreed(two_ranks, nowhere, nonfinite="skip")["x"])


def collectives_of_refusals() -> list[int]:
    stats = {"x": math.nan if dist.get_rank() == 0 else 1.0}
    counts = []
    with StatsReducer(name="refused", nonfinite="raise") as reducer:
        for _ in range(2):
            before = reducer.counters.collectives
            with pytest.raises(NonFiniteStat, match="'x': rank 0"):
                reducer(stats)
            counts.append(reducer.counters.collectives - before)
    return counts


def test_a_refusal_says_where_in_two_more_collectives(two_ranks: RankPool) -> None:
    """The first call agrees on a layout, too: that ranks hold the same is known without a gather of what they hold."""
    assert two_ranks.run(collectives_of_refusals).values() == [[3 + 2, 1 + 2]] * 2


# -- containers -------------------------------------------------------------------------------------------------------


HELD = [
    (OrderedDict(b=1.0, a=2.0), {"b": 1.0, "a": 2.0}),
    (defaultdict(float, a=3.0), {"a": 3.0}),
    ((1.0, (2.0,)), (1.0, (2.0,))),
    (Point(1.0, [2.0]), {"x": 1.0, "y": [2.0]}),
    (Scores(1.0, {"a": 2.0}), {"loss": 1.0, "extra": {"a": 2.0}}),
    ({"deep": [Point(Scores(1.0, 2.0), None)]}, {"deep": [{"x": {"loss": 1.0, "extra": 2.0}, "y": None}]}),
]


@pytest.mark.parametrize(("held", "want"), HELD, ids=[type(held).__name__ for held, _ in HELD])
def test_results_hold_dicts_lists_and_tuples(two_ranks: RankPool, held: Any, want: Any) -> None:
    for stats in ([held, held], [held, type(want)()]):
        got = agreed(two_ranks, stats, name=f"held {want!r}")
        assert repr(got) == repr(want)


def test_a_container_is_a_tuple_only_in_calls_in_which_all_ranks_have_a_tuple(two_ranks: RankPool) -> None:
    for _ in range(2):
        assert agreed(two_ranks, [{"c": [1.0]}, {"c": (3.0,)}], name="sequence") == {"c": [2.0]}
        assert agreed(two_ranks, [{"c": (1.0,)}, {"c": (3.0,)}], name="sequence") == {"c": (2.0,)}


def test_structures_100_deep_and_containers_held_twice_are_reduced() -> None:
    deep: Any = 1.0
    for _ in range(100):
        deep = {"k": deep}
    assert values(deep) == deep
    shared = [1.0]
    assert values({"a": shared, "b": shared}) == {"a": [1.0], "b": [1.0]}


def test_keys_that_equal_an_earlier_calls_int_are_refused() -> None:
    reduce_stats({1: 1.0, 2: 2.0})
    for stats in ({1.0: 1.0, 2.0: 2.0}, {(1, 2): 1.0, (int, int): 2.0}):
        with pytest.raises(InvalidStats, match="a key is a str or an int"):
            reduce_stats(stats)


# -- names ------------------------------------------------------------------------------------------------------------


def flat(stats: Any) -> dict[str, float]:
    return reduce_stats(stats).flat()


def test_flat_names(two_ranks: RankPool) -> None:
    stats = {"loss": 1, "train": {"loss": 2}, "l1": [3, {"a": 4}], 0: 5, "f": AnyFlag(True), "n": None}
    stats["p"] = Point(6, 7)
    want = {"loss": 1, "train/loss": 2, "l1[0]": 3, "l1[1]/a": 4, "0": 5, "f": 1.0, "p/x": 6, "p/y": 7}
    got = two_ranks.run(flat, PerRank([stats, {}])).values()
    assert got == [want, want]
    assert all(type(value) is float for value in got[0].values())


def test_paths_that_would_collide_are_escaped_alike_on_all_ranks(two_ranks: RankPool) -> None:
    first = {"a/b": 1.0, "x[0]": 2.0, 1: 3.0, "keep/this": 9.0}
    second = {"a": {"b": 4.0}, "x": [5.0], "1": 6.0, "": {"": 7.0}, "/": 8.0}
    got = two_ranks.run(flat, PerRank([first, second])).values()
    assert got[0] == got[1]
    assert len(got[0]) == 9
    assert sorted(got[0].values()) == [float(value) for value in range(1, 10)]
    assert got[0]["keep/this"] == 9.0
    assert got[0]["a\\/b"] == 1.0
    assert got[0]["a/b"] == 4.0


def test_keys_of_any_unicode_are_matched_by_code_points(two_ranks: RankPool) -> None:
    names = ["é", "e\u0301", "\ud800", "\0", "日本", "😀", "a.b", "a b", "\n", "", "." * 10_000]
    stats = [dict.fromkeys(names, 1.0), dict.fromkeys(reversed(names), 3.0)]
    assert agreed(two_ranks, stats) == dict.fromkeys(names, 2.0)


# -- size -------------------------------------------------------------------------------------------------------------


def generated(calls: int, per_call: int) -> tuple[int, int]:
    """Return the most memory in the third quarter of the calls and in the last: a layout grows until it is rebuilt."""
    import tracemalloc

    reducer = StatsReducer(name="generated")
    # Tracing goes on until the rank ends: `tracemalloc.stop` beside a gloo thread crashes CPython (gh-128679).
    tracemalloc.start()
    sizes: list[int] = []
    for call in range(calls):
        reducer({f"step {call} item {i}": 1.0 for i in range(per_call)} | {"loss": 1.0})
        sizes.append(tracemalloc.get_traced_memory()[0])
    return max(sizes[calls // 2 : -calls // 4]), max(sizes[-calls // 4 :])


@pytest.mark.slow
def test_generated_names_do_not_grow_memory_for_ever() -> None:
    for early, late in run_ranks(generated, 2, 240, 25, timeout_sec=120).values():
        assert late < early * 1.1, (early, late)


def test_a_new_key_drops_what_no_rank_holds_any_more(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(payloads_of_generated_names).values()
    assert first == second
    assert max(first) < 40_000  # 100 names a call, of which none comes again; 24 bytes for each of at most 1,100


def payloads_of_generated_names() -> list[int]:
    """Return the bytes of the buffer after each call."""
    sizes = []
    with StatsReducer(name="generated", group=dist.new_group()) as reducer:
        for call in range(25):
            stats = {f"call {call} key {i}": 1.0 for i in range(100)}
            reducer(stats)
            before = reducer.counters.payload_bytes
            reducer(stats)
            sizes.append(reducer.counters.payload_bytes - before)
    return sizes


# -- groups -----------------------------------------------------------------------------------------------------------


def in_subgroups() -> Any:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    own_group = groups[1] if rank == 1 else groups[0]
    answer = values({"x": float(rank)}, group=own_group)
    try:
        reduce_stats({"x": "no" if rank == 2 else 1.0}, group=own_group)
    except InvalidStats as error:
        return answer, str(error).splitlines()[1], error.ranks
    return answer, "", ()


def test_subgroups(three_ranks: RankPool) -> None:
    answers = three_ranks.run(in_subgroups).values()
    assert [answer[0] for answer in answers] == [{"x": 1.0}, {"x": 1.0}, {"x": 1.0}]
    for rank in (0, 2):
        assert answers[rank][1].startswith("  rank 2 (group rank 1) at 'x': str is not a leaf")
        assert answers[rank][2] == (2,)


def world_of_one() -> Any:
    with count_collectives() as count:
        answer = values({"a": 1.0}, 3), ddpstats.any_rank(True), ddpstats.all_ranks(False)
    return answer, count.total


def test_group_of_one_rank_needs_no_collective() -> None:
    assert run_ranks(world_of_one, 1).values() == [(({"a": 1.0}, True, False), 0)]


def test_argument_that_cannot_work_is_config_error() -> None:
    bad: list[dict[str, Any]] = [{"nonfinite": "ignore"}, {"name": 3}, {"timeout_sec": 0}, {"timeout_sec": math.nan}]
    for settings in bad:
        with pytest.raises(ConfigError):
            StatsReducer(**settings)
    closed = StatsReducer()
    closed.close()
    closed.close()
    with pytest.raises(ConfigError, match="closed"):
        closed({})


# -- decisions --------------------------------------------------------------------------------------------------------


def decisions(flags: list[bool]) -> list[bool]:
    flag = flags[dist.get_rank()]
    return [ddpstats.any_rank(flag), ddpstats.all_ranks(t(flag)), ddpstats.any_rank(np.bool_(flag))]


def test_decisions_in_lockstep(three_ranks: RankPool) -> None:
    for flags in ([False, False, False], [False, True, False], [True, True, True], [True, False, False]):
        want = [any(flags), all(flags), any(flags)]
        assert three_ranks.run(decisions, flags).values() == [want] * 3


# -- nothing changes the training -------------------------------------------------------------------------------------


def says_something(capfd: Any = None) -> int:
    import logging

    reduce_stats({"a": 1.0})
    return len(logging.getLogger().handlers) + len(logging.getLogger("ddpstats").handlers)


def test_no_output_and_no_logging(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(says_something, 2).values() == [0, 0]
    assert capfd.readouterr() == ("", "")
