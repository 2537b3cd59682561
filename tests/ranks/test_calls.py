"""Reductions on a group keep one order, `start` waits for no peer, and a call is one collective."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import Max, Min, StatsReducer, all_ranks, any_rank, reduce_stats
from ddpstats.errors import ConfigError, InvalidStats, NonFiniteStat, ProtocolMismatch, SchemaConflict
from ddpstats.testing import RankPool, count_collectives

LIMIT_SEC = 60.0
TIMEOUT_SEC = 30.0


def workers() -> int:
    return sum(thread.name == "ddpstats" for thread in threading.enumerate())


class Recording:
    """A leaf that records which thread reads it."""

    def __init__(self, value: float, seen: list[int]) -> None:
        self.value, self.seen = value, seen

    def __float__(self) -> float:
        self.seen.append(threading.get_ident())
        return self.value


# -- order -------------------------------------------------------------------------------------------------------------


def mixed_order() -> list[Any]:
    """Make pending and direct calls in turn, each with its own name: any other order is a ProtocolMismatch."""
    rank, group = float(dist.get_rank()), dist.new_group()
    reducers = [StatsReducer(group=group, name=f"n{i}", timeout_sec=TIMEOUT_SEC) for i in range(4)]
    results: list[Any] = []
    for step in range(5):
        first = reducers[0].start({f"new{step}": rank + 1})
        direct = reducers[1]({"v": rank + 2})
        results.append(first.done())  # the direct call waited behind it
        second = reducers[2].start({"v": rank + 3})
        decided = any_rank(rank == 1, group=group)
        third = reducers[3].start({"v": Max(rank)})
        values = [pending.result().values for pending in (third, second, first)]  # asked for in another order
        results += [direct.values, decided, *values]
    for reducer in reducers:
        reducer.close()
    return results


def test_pending_and_direct_calls_keep_one_order(two_ranks: RankPool) -> None:
    expected: list[Any] = []
    for step in range(5):
        expected += [True, {"v": 2.5}, True, {"v": 1.0}, {"v": 3.5}, {f"new{step}": 1.5}]
    assert two_ranks.run(mixed_order, timeout_sec=LIMIT_SEC).values() == [expected] * 2


def many_threads() -> list[list[float]]:
    """Use four groups at once, each by its own thread: no order holds between groups."""
    groups = [dist.new_group() for _ in range(4)]
    results: list[list[float]] = [[] for _ in groups]

    def work(number: int) -> None:
        with StatsReducer(group=groups[number], timeout_sec=TIMEOUT_SEC) as reducer:
            for step in range(30):
                stats = {f"v{(step + dist.get_rank()) % 3}": 1.0, "v": float(number * 100 + step)}
                pending = reducer.start(stats) if step % 2 else None
                result = reducer(stats) if pending is None else pending.result()
                results[number].append(result.values["v"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SEC)
    return results


def test_groups_may_be_used_by_threads_of_their_own(two_ranks: RankPool) -> None:
    expected = [[float(number * 100 + step) for step in range(30)] for number in range(4)]
    assert two_ranks.run(many_threads, timeout_sec=LIMIT_SEC).values() == [expected] * 2


# -- start, done, result -----------------------------------------------------------------------------------------------


def start_while_peer_stays_away() -> list[Any]:
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC)
    reducer({"v": 0.0})
    if dist.get_rank() == 1:
        dist.barrier()
    pending = [reducer.start({"v": float(step)}) for step in range(3)]
    if dist.get_rank() == 0:
        was_done = any(each.done() for _ in range(100) for each in pending)
        dist.barrier()
    else:
        was_done = False
    values = [each.result().values["v"] for each in pending]
    again = [each.result().values["v"] for each in pending]
    reducer.close()
    return [was_done, values, again, [each.done() for each in pending]]


def test_neither_start_nor_done_waits_for_a_peer(two_ranks: RankPool) -> None:
    results = two_ranks.run(start_while_peer_stays_away, timeout_sec=LIMIT_SEC).values()
    assert results == [[False, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [True] * 3]] * 2


def values_taken_at_start() -> list[Any]:
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC)
    reducer.start({"warm": 1.0}).result()
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 changes everything before its worker could have sent it
    tensor, weight = torch.tensor(1.0), torch.tensor([1.0, 3.0])
    element, inner = torch.tensor([1.0, 2.0]), {"x": 5.0}
    stats = {"t": tensor, "e": element, "d": inner, "own": ddpstats.Mean(element, weight), "l": [1.0]}
    pending = reducer.start(stats, weight)
    tensor.fill_(100.0)
    weight.fill_(100.0)
    element.fill_(100.0)
    inner["x"] = inner["y"] = 100.0
    stats["late"] = 100.0
    stats["l"].append(100.0)  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        dist.barrier()
    values = pending.result().values
    reducer.close()
    return [values]


def test_start_takes_the_values_of_now(two_ranks: RankPool) -> None:
    expected = {"t": 1.0, "e": 1.75, "d": {"x": 5.0}, "own": 1.75, "l": [1.0]}
    assert two_ranks.run(values_taken_at_start, timeout_sec=LIMIT_SEC).values() == [[expected]] * 2


def errors_at_result() -> list[Any]:
    rank = dist.get_rank()
    group = dist.new_group()
    reducer = StatsReducer(group=group, name="e", timeout_sec=TIMEOUT_SEC)
    strict = StatsReducer(group=group, name="s", nonfinite="raise", timeout_sec=TIMEOUT_SEC)
    renamed = StatsReducer(group=group, name=f"rank {rank}", timeout_sec=TIMEOUT_SEC)
    pending = [
        reducer.start({"v": object() if rank else 1.0}),
        reducer.start({"v": 1.0}),
        reducer.start({"v": [1.0] if rank else 1.0}),
        strict.start({"v": float("nan") if rank else 1.0}),
        renamed.start({"v": 1.0}),
        reducer.start({"v": 2.0}),
    ]
    results: list[Any] = []
    for reduction in pending:
        for _ in range(2):  # the same each time
            try:
                results.append(reduction.result().values)
            except (InvalidStats, SchemaConflict, NonFiniteStat, ProtocolMismatch) as error:
                results.append((type(error), str(error), error.ranks))
    for used in (reducer, strict, renamed):
        used.close()
    return results


def test_an_error_surfaces_at_result_on_every_rank(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(errors_at_result, timeout_sec=LIMIT_SEC).values()
    assert first == second
    assert first[::2] == first[1::2]
    kinds = [result if isinstance(result, dict) else result[0] for result in first[::2]]
    assert kinds == [InvalidStats, {"v": 1.0}, SchemaConflict, NonFiniteStat, ProtocolMismatch, {"v": 2.0}]


# -- threads -----------------------------------------------------------------------------------------------------------


def threads_that_read() -> bool:
    """Return whether the calling thread alone reads values, and a direct call starts no thread."""
    seen: list[int] = []
    before = workers()
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC)
    reducer({"v": Recording(1.0, seen)})
    is_direct = workers() == before
    reducer.start({"v": Recording(2.0, seen)}).result()
    reducer.close()
    return is_direct and set(seen) == {threading.get_ident()}


def test_direct_call_starts_no_thread_and_values_are_read_by_the_caller(two_ranks: RankPool) -> None:
    assert two_ranks.run(threads_that_read, timeout_sec=LIMIT_SEC).values() == [True] * 2


def threads_left() -> list[int]:
    group = dist.new_group()
    before, counts = workers(), list[int]()
    first, second = (StatsReducer(group=group, name=name, timeout_sec=TIMEOUT_SEC) for name in "ab")
    first.start({"v": 1.0})
    second.start({"v": 1.0}).result()
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="this StatsReducer is closed"):
        first.start({"v": 1.0})
    with pytest.raises(ConfigError, match="this StatsReducer is closed"):
        first({"v": 1.0})
    pending = second.start({"v": 2.0})
    second.close()  # after what is pending
    assert pending.done()
    counts.append(workers())
    with StatsReducer(group=group, timeout_sec=TIMEOUT_SEC) as third:
        third.start({"v": 1.0}).result()
    counts.append(workers())
    fourth = StatsReducer(group=group, timeout_sec=TIMEOUT_SEC)
    fourth.start({"v": 1.0}).result()
    del fourth  # never closed
    gc.collect()
    deadline = time.monotonic() + 20
    while workers() > before and time.monotonic() < deadline:  # it ends by itself
        time.sleep(0.01)
    counts.append(workers())
    return [count - before for count in counts]


def test_the_last_close_leaves_no_thread_behind(two_ranks: RankPool) -> None:
    assert two_ranks.run(threads_left, timeout_sec=LIMIT_SEC).values() == [[0, 0, 0]] * 2


# -- layouts belong to the group and the name --------------------------------------------------------------------------


def shared_layout() -> list[Any]:
    group = dist.new_group()
    first = StatsReducer(group=group, name="train", timeout_sec=TIMEOUT_SEC)
    second = StatsReducer(group=group, name="train", timeout_sec=TIMEOUT_SEC)
    renamed = StatsReducer(group=group, name="valid", timeout_sec=TIMEOUT_SEC)
    stats = {f"v{dist.get_rank()}": 1.0, "v": [1.0, 2.0]}
    first(stats)
    second(stats)
    reduce_stats(stats, group=group, name="train")
    renamed(stats)
    first(stats)
    counters = [reducer.counters for reducer in (first, second, renamed)]
    return [[(counts.calls, counts.renegotiations) for counts in counters], second.counters.collectives]


def test_reducers_of_one_name_share_what_was_agreed(two_ranks: RankPool) -> None:
    assert two_ranks.run(shared_layout, timeout_sec=LIMIT_SEC).values() == [[[(2, 1), (1, 0), (1, 1)], 1]] * 2


# -- what goes over the wire -------------------------------------------------------------------------------------------


def counted(reducer: StatsReducer, *calls: Any) -> list[dict[str, int]]:
    """Return the collectives of each call, as the process group saw them; our own counters must say the same."""
    counts = []
    for stats in calls:
        before = reducer.counters
        with count_collectives() as seen:
            reducer(stats)
        after = reducer.counters
        assert after.calls == before.calls + 1
        assert after.collectives - before.collectives == seen.total
        assert after.payload_bytes - before.payload_bytes == sum(seen.bytes_by_op.values())
        counts.append(dict(seen.by_op))
    return counts


STEADY = {"allreduce": 1}


def steady_state() -> list[Any]:
    rank = dist.get_rank()
    reducer = StatsReducer(group=dist.new_group(), name="steady", timeout_sec=TIMEOUT_SEC)
    keys = ["l1", "snr", "ctc", "att", "acc"]
    reducer(dict.fromkeys(keys, 1.0) | {"nest": [{"x": 1.0}, None, (1, 2.0)]})
    calls: list[Any] = [{key: 1.0} for key in keys]
    calls += [{keys[(step + rank) % 5]: float(step), keys[(step * 3 + rank) % 5]: True} for step in range(20)]
    calls += [{}, None, {"nest": None}, {"nest": [{"x": None}]}, {"l1": float("nan")}, {"l1": torch.tensor(1)}]
    return counted(reducer, *calls)[5 + 20 :] + counted(reducer, *calls)


def test_one_all_reduce_per_call_whatever_keys_are_present(three_ranks: RankPool) -> None:
    for counts in three_ranks.run(steady_state, timeout_sec=LIMIT_SEC).values():
        assert counts[6:] == [STEADY] * 31
        assert max(sum(count.values()) for count in counts[:6]) <= 4  # where None turned up for the first time


def with_extremes() -> list[Any]:
    group = dist.new_group()
    reducer = StatsReducer(group=group, name="extremes", timeout_sec=TIMEOUT_SEC)
    plain = StatsReducer(group=group, name="plain", timeout_sec=TIMEOUT_SEC)
    rank = dist.get_rank()
    reducer({"lo": Min(1.0), "hi": Max(2.0), "v": 3.0})
    plain({"v": 1.0})
    some: list[Any] = [{"lo": Min(rank)} if rank else {"hi": Max(rank), "v": 1.0}, {"v": 1.0}, {}]
    return [counted(reducer, *some), counted(plain, {"v": 1.0})]


def test_minima_and_maxima_share_a_second_all_reduce_in_calls_that_hold_one(three_ranks: RankPool) -> None:
    expected = [[{"allreduce": 2}, STEADY, STEADY], [STEADY]]
    assert three_ranks.run(with_extremes, timeout_sec=LIMIT_SEC).values() == [expected] * 3


def decisions() -> list[Any]:
    group = dist.new_group()
    rank = dist.get_rank()
    with count_collectives() as first:
        all_ranks(True, group=group)
    with count_collectives() as seen:
        answers = [any_rank(rank == 2, group=group), any_rank(False, group=group), all_ranks(rank < 2, group=group)]
    return [dict(first.by_op), dict(seen.by_op), answers]


def test_a_decision_is_one_all_reduce(three_ranks: RankPool) -> None:
    expected = [{"allgather": 1, "allreduce": 1}, {"allreduce": 3}, [True, False, False]]  # the handshake comes first
    assert three_ranks.run(decisions, timeout_sec=LIMIT_SEC).values() == [expected] * 3


def sequence_number(group: Any) -> int:
    """Return how many collectives this group has seen."""
    return int(group._get_sequence_number_for_group())


def payloads() -> list[Any]:
    """Return the bytes of calls of two names on one group, and how many collectives the user's group saw."""
    rank, group, own = dist.get_rank(), dist.group.WORLD, dist.new_group()
    large = StatsReducer(group=own, name="large", timeout_sec=TIMEOUT_SEC)
    small = StatsReducer(group=own, name="small", timeout_sec=TIMEOUT_SEC)
    keys = {f"key {i}": 1.0 for i in range(300)}
    large(keys), small({"v": 1.0}), any_rank(True)
    before = sequence_number(group)
    bytes_of = []
    for reducer, held in ((large, keys), (large, keys if rank == 0 else {}), (large, {}), (small, {"v": 1.0})):
        with count_collectives() as seen:
            reducer(held)
        bytes_of.append(dict(seen.bytes_by_op))
    any_rank(True)
    return [bytes_of, sequence_number(group) - before]


def test_the_size_is_that_of_the_largest_layout_and_the_users_group_carries_nothing(three_ranks: RankPool) -> None:
    by_rank = three_ranks.run(payloads, timeout_sec=LIMIT_SEC).values()
    (first, *later), on_the_users_group = by_rank[0]
    assert first["allreduce"] >= 300 * 24
    assert later == [first] * 3
    assert on_the_users_group == 0
    assert by_rank == [by_rank[0]] * 3


# -- alone -------------------------------------------------------------------------------------------------------------


def test_alone_nothing_is_sent_and_errors_are_the_same() -> None:
    with count_collectives() as seen, StatsReducer(timeout_sec=TIMEOUT_SEC) as reducer:
        pending = reducer.start({"v": 1.0, "hi": Max(2)})
        assert reducer({"v": 3.0}).values == {"v": 3.0}
        assert pending.result().values == {"v": 1.0, "hi": 2.0}
        assert any_rank(1)
        assert not all_ranks(0)
        with pytest.raises(InvalidStats, match="rank 0 at 'v': object is not a leaf"):
            reducer({"v": object()})
        with pytest.raises(InvalidStats, match="rank 0 at 'v': object is not a leaf"):
            reducer.start({"v": object()}).result()
        assert reducer({"v": 1.0}).values == {"v": 1.0}
    assert seen.total == 0


def test_alone_no_time_limit_applies() -> None:
    stats = {f"k{index}": 1.0 for index in range(100_000)}
    with StatsReducer(timeout_sec=1e-3) as reducer:  # writing so many into the buffer takes longer
        assert reducer(stats).values == stats
