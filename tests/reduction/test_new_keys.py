"""A reduction with keys never seen before takes at most four collectives, and gives what any other gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsReducer, Sum
from ddpstats.errors import DdpstatsError, InvalidStats, ProtocolMismatch, SchemaConflict
from ddpstats.testing import RankPool, count_collectives
from tests.reduction.shapes import Point, Scores

RENEGOTIATED = {"allreduce": 2, "allgather": 2}
"""The sum that finds ranks stale, lengths, what each rank holds, the sum."""


def of_each_call(name: str, make: Callable[[int, int], Any], weight: Any, calls: int, **policy: Any) -> list[Any]:
    """Return values or error, then collectives by operation, of every call; our counters must say the same."""
    outcomes: list[Any] = []
    with StatsReducer(name=name, group=dist.new_group(), **policy) as reducer:
        reducer({"loss": 1.0})
        for call in range(calls):
            before = reducer.counters.collectives
            with count_collectives() as seen:
                try:
                    answer = reducer(make(call, dist.get_rank()), weight)
                    outcomes.append((answer.values, answer.weights, answer.present_ranks, answer.flat()))
                except DdpstatsError as error:
                    outcomes.append((type(error).__name__, str(error), error.path, error.ranks))
            assert reducer.counters.collectives - before == seen.total
            outcomes.append(dict(seen.by_op))
    return outcomes


def agreed(pool: RankPool, *args: Any, **settings: Any) -> tuple[list[Any], list[dict[str, int]]]:
    outcomes = pool.run(of_each_call, *args, **settings).values()
    assert len(set(map(repr, outcomes))) == 1, outcomes
    return outcomes[0][::2], outcomes[0][1::2]


def fresh(call: int, rank: int) -> Any:
    """Some keys of all ranks, some of this one only, in another order on each."""
    stats: dict[str, Any] = {f"all {call}": float(rank), f"of {rank} in {call}": 5.0, "loss": 2.0 * rank}
    return stats if rank else dict(reversed(stats.items()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_new_keys_at_every_call_cost_four_collectives(two_ranks: RankPool, three_ranks: RankPool, ranks: int) -> None:
    answers, counts = agreed(two_ranks if ranks == 2 else three_ranks, "fresh", fresh, 4.0, 30)
    assert counts == [RENEGOTIATED] * 30
    for call, (values, weights, present, flat) in enumerate(answers):
        want = {f"all {call}": (ranks - 1) / 2, "loss": ranks - 1.0} | {
            f"of {rank} in {call}": 5.0 for rank in range(ranks)
        }
        assert values == flat == want
        assert weights == {key: 4.0 * (1 if key.startswith("of") else ranks) for key in want}
        assert present == {key: 1 if key.startswith("of") else ranks for key in want}


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
    assert counts == [{"allreduce": 3, "allgather": 2}] * 3  # one more for minima and maxima
    want = {
        "sum": 3.0, "low": -5.0, "high": 1.0, "some": True, "every": False, "own": 1.0, "none": None,
        "maybe": {"deep": [1.0]}, "list": [1.0, 1.0], "kind": [2.0],
        "point": {"x": 1.0, "y": {"loss": 0.5, "extra": 3.0}},
        "vector": 2.25,
    }  # fmt: skip
    for call, (values, *_) in enumerate(answers):
        assert values == {f"{key} {call}": value for key, value in want.items()}


def conflicting(call: int, rank: int) -> Any:
    return {f"fine {call}": 1.0, f"x {call}": [1.0] if rank else 1.0}


def unreadable(call: int, rank: int) -> Any:
    return {f"fine {call}": 1.0, f"x {call}": "text" * 5000 if rank else 1.0, f"p{'q' * 2000}": object() if rank else 0}


def test_errors_cost_three_collectives_and_leave_no_trace(two_ranks: RankPool) -> None:
    for make, kind in ((conflicting, SchemaConflict), (unreadable, InvalidStats)):
        answers, counts = agreed(two_ranks, "errors", make, 1.0, 3)
        assert counts == [{"allreduce": 1, "allgather": 2}] * 3
        assert [(answer[0], answer[2]) for answer in answers] == [(kind.__name__, f"x {call}") for call in range(3)]


def all_the_same(call: int, rank: int) -> Any:
    return {f"all {call}": float(rank)}


def test_new_keys_that_all_ranks_hold_cost_three_collectives(two_ranks: RankPool) -> None:
    """Equal lengths and digests say that ranks hold the same: what they hold need not be sent."""
    _, counts = agreed(two_ranks, "same", all_the_same, 1.0, 3)
    assert counts == [{"allreduce": 2, "allgather": 1}] * 3


def sized(count: int) -> tuple[int, int]:
    with StatsReducer(group=dist.new_group()) as reducer:
        reducer({f"{dist.get_rank()} {i}": 1.0 for i in range(count)})
        return reducer.counters.collectives, reducer.counters.payload_bytes


@pytest.mark.parametrize("count", [10, 10_000])
def test_the_number_of_new_keys_does_not_count(two_ranks: RankPool, count: int) -> None:
    answers = two_ranks.run(sized, count, timeout_sec=90).values()
    assert answers[0] == answers[1]
    assert answers[0][0] == 4
    assert answers[0][1] <= 2048 + 100 * count


# -- keys and names that JSON changes ---------------------------------------------------------------------------------

TWO_SURROGATES = "\ud83d" + "\ude00"
"""Two characters, which JSON reads as one."""


def reduces_two_surrogates(group: Any = None) -> tuple[str, int, dict[str, float]]:
    with StatsReducer(name="surrogates", group=group, timeout_sec=20) as reducer:
        with pytest.raises(ProtocolMismatch) as caught:
            reducer({TWO_SURROGATES: 1.0})
        return str(caught.value), reducer.counters.collectives, reducer({"loss": 1.0}).values


def test_a_key_that_json_changes_is_refused_at_once(two_ranks: RankPool) -> None:
    for message, collectives, values in [reduces_two_surrogates(), *two_ranks.run(reduces_two_surrogates).values()]:
        assert "do not settle on a layout for name='surrogates'" in message
        assert collectives < 20
        assert values == {"loss": 1.0}


class Name(str):
    """A name that computes what it prints."""

    __slots__ = ()

    def __str__(self) -> str:
        raise AssertionError("code of the user's class ran")


def reduces_under_a_name_of_its_own_class() -> list[dict[str, float]]:
    return [ddpstats.reduce_stats({key: 1.0}, name=Name("train")).values for key in ("a", "b")]


def test_a_name_of_a_subclass_of_str_is_a_name(two_ranks: RankPool) -> None:
    assert two_ranks.run(reduces_under_a_name_of_its_own_class).values() == [[{"a": 1.0}, {"b": 1.0}]] * 2
