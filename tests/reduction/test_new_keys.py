"""Keys that were never seen before, at every call: two collectives, and everything else as ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsReducer, Sum, recursive_average, reduce_stats
from ddpstats._agreement.channel import channel_of
from ddpstats._agreement.lanes import ROOMS, Buffer, Seal, capacity_for, room_lanes
from ddpstats._reduction.reducer import kept_reducer
from ddpstats._reduction.site import ReductionSite
from ddpstats.errors import DdpstatsError, InvalidStats, NonFiniteStat, SchemaConflict
from ddpstats.testing import RankPool, ThreadGroup, count_collectives, run_ranks, run_threads
from tests.reduction.shapes import Point, Scores

EXCHANGE = {"allreduce": 1, "allgather": 1}


def of_each_call(name: str, make: Callable[[int, int], Any], weight: Any, calls: int, **policy: Any) -> list[Any]:
    """(values or error, collectives by operation) of every call; our counters must say the same."""
    found: list[Any] = []
    with StatsReducer(name=name, group=dist.new_group(), **policy) as reducer:
        reducer({"loss": 1.0})
        for call in range(calls):
            before = reducer.counters.collectives
            with count_collectives() as seen:
                try:
                    answer = reducer(make(call, dist.get_rank()), weight)
                    found.append((answer.values, answer.weights, answer.present_ranks, answer.flat()))
                except DdpstatsError as error:
                    found.append((type(error).__name__, str(error), error.path, error.ranks))
            assert reducer.counters.collectives - before == seen.total
            found.append(dict(seen.by_op))
    return found


def agreed(pool: RankPool, *args: Any, **settings: Any) -> tuple[list[Any], list[dict[str, int]]]:
    outcomes = pool.run(of_each_call, *args, **settings).values()
    assert len(set(map(repr, outcomes))) == 1, outcomes
    return outcomes[0][::2], outcomes[0][1::2]


def fresh(call: int, rank: int) -> Any:
    """Some keys of all ranks, some of this one only, in another order on each."""
    mine: dict[str, Any] = {f"all {call}": float(rank), f"of {rank} in {call}": 5.0, "loss": 2.0 * rank}
    return mine if rank else dict(reversed(mine.items()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_new_keys_at_every_call_cost_two_collectives(two_ranks: RankPool, three_ranks: RankPool, ranks: int) -> None:
    answers, counts = agreed(two_ranks if ranks == 2 else three_ranks, "fresh", fresh, 4.0, 30)
    assert counts == [EXCHANGE] * 30
    for call, (values, weights, present, flat) in enumerate(answers):
        want = {f"all {call}": (ranks - 1) / 2, "loss": ranks - 1.0} | {
            f"of {rank} in {call}": 5.0 for rank in range(ranks)
        }
        assert values == flat == want
        assert weights == {key: 4.0 * (1 if key.startswith("of") else ranks) for key in want}
        assert present == {key: 1 if key.startswith("of") else ranks for key in want}


def on_one_rank(call: int, rank: int) -> Any:
    return {"loss": 1.0} | ({f"new {call}": 3.0} if rank == call % 2 else {})


def test_a_key_that_is_new_on_one_rank_only(two_ranks: RankPool) -> None:
    answers, counts = agreed(two_ranks, "one", on_one_rank, 2.0, 6)
    assert counts == [EXCHANGE] * 6
    assert [values for values, *_ in answers] == [{"loss": 1.0, f"new {call}": 3.0} for call in range(6)]


def of_all_kinds(call: int, rank: int) -> Any:
    return {
        f"sum {call}": Sum(rank + 1),
        f"low {call}": Min(rank - 5.0),
        f"high {call}": Max(rank),
        f"some {call}": AnyFlag(rank == 1),
        f"every {call}": All(rank == 1),
        f"own {call}": Mean(float(rank), weight=rank),
        f"none {call}": None,
        f"maybe {call}": None if rank else {"deep": [1.0, 2.0][: rank + 1]},
        f"list {call}": [1.0] * (rank + 1),
        f"kind {call}": (1.0,) if rank else [3.0],
        f"point {call}": Point(1.0, Scores(rank, 3.0)),
        f"vector {call}": torch.arange(3.0) + rank,
    }


def test_leaves_of_all_kinds(two_ranks: RankPool) -> None:
    weight = torch.tensor([0.0, 1.0, 3.0])
    answers, counts = agreed(two_ranks, "kinds", of_all_kinds, weight, 3)
    assert counts == [EXCHANGE] * 3  # minima and maxima are in it
    want = {
        "sum": 3.0, "low": -5.0, "high": 1.0, "some": True, "every": False, "own": 1.0, "none": None,
        "maybe": {"deep": [1.0]}, "list": [1.0, 1.0], "kind": [2.0], "point": Point(1.0, Scores(0.5, 3.0)),
        "vector": 2.25,
    }  # fmt: skip
    for call, (values, *_) in enumerate(answers):
        assert values == {f"{key} {call}": value for key, value in want.items()}
        assert type(values[f"point {call}"]) is Point


def same_again(call: int, rank: int) -> Any:
    return of_all_kinds(call // 2, rank)


def test_the_next_call_finds_the_layout(two_ranks: RankPool) -> None:
    answers, counts = agreed(two_ranks, "again", same_again, torch.tensor([0.0, 1.0, 3.0]), 4)
    assert counts == [EXCHANGE, {"allreduce": 2}] * 2
    assert answers[0][0] == answers[1][0]


def colliding(call: int, rank: int) -> Any:
    return {f"a/b {call}": 1.0} if rank else {"a": {f"b {call}": 2.0}}


def test_names_that_collide_are_escaped_alike(two_ranks: RankPool) -> None:
    answers, counts = agreed(two_ranks, "names", colliding, 1.0, 3)
    assert counts == [EXCHANGE] * 3
    assert [flat for *_, flat in answers] == [{f"a/b {call}": 2.0, f"a\\/b {call}": 1.0} for call in range(3)]


@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_values_that_are_not_finite(two_ranks: RankPool, policy: str) -> None:
    answers, counts = agreed(two_ranks, "nonfinite", not_finite, 1.0, 3, nonfinite=policy)
    assert counts == [EXCHANGE] * 3
    for call, answer in enumerate(answers):
        if policy == "raise":
            kind, text, path, ranks = answer
            assert (kind, path, ranks) == (NonFiniteStat.__name__, f"x {call}", (1,))
            assert text.split("\n")[1:] == [f"  'x {call}': rank 1", f"  'low {call}': rank 1"]
        else:
            assert answer[0][f"y {call}"] == 2.0
            assert answer[0][f"x {call}"] == (1.0 if policy == "skip" else math.inf)
            assert repr(answer[0][f"low {call}"]) == ("0.0" if policy == "skip" else "nan")


def not_finite(call: int, rank: int) -> Any:
    bad = rank == 1
    return {f"x {call}": math.inf if bad else 1.0, f"low {call}": Min(math.nan if bad else 0), f"y {call}": 2.0}


def conflicting(call: int, rank: int) -> Any:
    return {f"fine {call}": 1.0, f"x {call}": [1.0] if rank else 1.0}


def unreadable(call: int, rank: int) -> Any:
    return {f"fine {call}": 1.0, f"x {call}": "text" * 5000 if rank else 1.0, f"p{'q' * 2000}": object() if rank else 0}


def test_errors_cost_two_collectives_too_and_leave_no_trace(two_ranks: RankPool) -> None:
    for make, kind in ((conflicting, SchemaConflict), (unreadable, InvalidStats)):
        answers, counts = agreed(two_ranks, "errors", make, 1.0, 3)
        assert counts == [EXCHANGE] * 3
        assert [(answer[0], answer[2]) for answer in answers] == [(kind.__name__, f"x {call}") for call in range(3)]


def class_of_one_rank() -> Any:
    class Local(Point):
        pass

    group = dist.new_group()
    mine = {"new": Local(1.0, 2.0)} if dist.get_rank() == 0 else {"other": 1.0}
    with StatsReducer(group=group) as reducer:
        first = type(reducer(mine).values["new"]).__name__
        cost = reducer.counters.collectives
        return first, cost, type(reducer(mine).values["new"]).__name__, reducer.counters.collectives - cost


def test_a_class_that_a_rank_lacks(two_ranks: RankPool) -> None:
    """Whether a rank can make the result is known to that rank alone, so it has to say so first."""
    assert two_ranks.run(class_of_one_rank).values() == [("dict", 4, "dict", 1)] * 2


def sized(count: int) -> tuple[int, int]:
    with StatsReducer(group=dist.new_group()) as reducer:
        reducer({f"{dist.get_rank()} {i}": 1.0 for i in range(count)})
        return reducer.counters.collectives, reducer.counters.payload_bytes


@pytest.mark.parametrize("count", [0, 1, 10, 50, 1000, 10_000])
def test_the_room_fits(two_ranks: RankPool, count: int) -> None:
    found = two_ranks.run(sized, count, timeout_sec=60).values()
    assert found[0] == found[1]
    assert found[0][0] == (2 if count else 1)
    assert found[0][1] <= 512 + max(1024, 4 * 45 * count)


def test_above_the_largest_room_it_takes_four_or_more(two_ranks: RankPool) -> None:
    """45,000 keys of a rank are more than a megabyte."""
    found = two_ranks.run(sized, 45_000, timeout_sec=90).values()
    assert found[0] == found[1]
    assert found[0][0] in (4, 5)


def uneven(sizes: list[int]) -> tuple[int, float]:
    rank = dist.get_rank()
    with StatsReducer(group=dist.new_group()) as reducer:
        stats = {f"{rank} {i}": float(rank) for i in range(sizes[rank])} | {"both": 2.0 * rank}
        values = reducer(stats).values
        assert len(values) == sum(sizes) + 1
        return reducer.counters.collectives, values["both"]


def test_ranks_of_very_different_sizes(three_ranks: RankPool) -> None:
    assert three_ranks.run(uneven, [0, 3000, 5]).values() == [(2, 2.0)] * 3


def averaged(call: int) -> Any:
    rank = dist.get_rank()
    dtype = [torch.float16, torch.float32][rank]
    before = kept_reducer(None, None, "propagate", "recursive_average").counters.collectives
    obj = {f"x {call}": torch.tensor([1.0, 3.0], dtype=dtype), f"of {rank} {call}": torch.tensor([2, 4])}
    found, weight = recursive_average(obj, torch.tensor([1.0, 1.0 + rank]), True)
    after = kept_reducer(None, None, "propagate", "recursive_average").counters.collectives
    return {key: (value.item(), str(value.dtype)) for key, value in found.items()}, weight.item(), after - before


def test_recursive_average_keeps_its_dtypes(two_ranks: RankPool) -> None:
    for call in range(3):
        found = two_ranks.run(averaged, call).values()
        assert found[0] == found[1]
        mean = pytest.approx((1 + 3 + 1 + 6) / 5)
        want = {f"x {call}": (mean, "torch.float32"), f"of 0 {call}": (3.0, "torch.float32")}
        want[f"of 1 {call}"] = (pytest.approx(10 / 3), "torch.float32")
        assert found[0] == (want, 5.0, 2)


def in_thread(group: ThreadGroup, calls: int) -> list[Any]:
    with group.reducer(timeout_sec=60) as reducer:
        found: list[Any] = [reducer(fresh(call, group.rank), 2.0).values for call in range(calls)]
        return [*found, reducer.counters.collectives]


def test_32_ranks() -> None:
    found = run_threads(in_thread, 32, 5).values()
    assert len(set(map(repr, found))) == 1
    assert found[0][-1] == 10
    assert found[0][4]["all 4"] == 15.5


def test_four_ranks() -> None:
    found = run_ranks(of_each_call, 4, "four", fresh, 1.0, 3, timeout_sec=90).values()
    assert len(set(map(repr, found))) == 1
    assert found[0][1::2] == [EXCHANGE] * 3


def pending(calls: int) -> list[Any]:
    with StatsReducer(group=dist.new_group()) as reducer:
        started = [reducer.start(fresh(call, dist.get_rank()), 2.0) for call in range(calls)]
        return [one.result().values for one in started]


def test_reductions_that_were_started(two_ranks: RankPool) -> None:
    found = two_ranks.run(pending, 5).values()
    assert found[0] == found[1]
    assert found[0][4]["all 4"] == 0.5


def alone() -> Any:
    return reduce_stats({"a": 1.0, "b": Max(2)}, 3.0, name="alone").values


def test_alone() -> None:
    assert alone() == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("sizes", [[0], [1024], [1025, 3], [5, 4096, 16_384], [2**20, 1], [1] * 1000 + [70_000]])
def test_the_lanes_tell_the_room_that_is_enough_for_all(sizes: list[int]) -> None:
    buffer = Buffer(capacity_for(16))
    total = [sum(lanes) for lanes in zip(*map(room_lanes, sizes), strict=True)]
    buffer.seal(Seal.of(bytes(8), 1, 0), (total[0], total[1], total[2]), stale=False, failed=False)
    assert buffer.room() == min(room for room in ROOMS if room >= max(sizes))


def test_the_lanes_tell_that_there_is_no_room() -> None:
    buffer = Buffer(capacity_for(16))
    buffer.seal(Seal.of(bytes(8), 1, 0), room_lanes(ROOMS[-1] + 1), stale=False, failed=False)
    assert buffer.room() is None
    most = tuple(lane * 131_071 for lane in room_lanes(ROOMS[2]))
    buffer.seal(Seal.of(bytes(8), 1, 0), (most[0], most[1], most[2]), stale=False, failed=False)
    assert buffer.room() == ROOMS[2]


def test_keys_that_are_no_longer_used_are_dropped_many_at_once() -> None:
    """Of the unused ones 1,024 stay; what is more goes when it is an eighth of the layout."""
    sizes = []
    with StatsReducer(name="dropped") as reducer:
        for call in range(300):
            reducer({f"{call}/{i}": 1.0 for i in range(10)})
            agreement = channel_of(None)._agreement
            assert agreement is not None
            site = agreement.sites["reduce_stats", "dropped"]
            assert isinstance(site, ReductionSite)
            sizes.append(site.layout.size)
    later = sizes[150:]
    assert min(later) >= 1024
    assert max(later) <= (1024 + 2 * 10) * 8 / 7 + 10
    assert sum(after < before for before, after in pairwise(later)) <= 15
