"""A reduction in the middle of another one: in the handler of a signal, or where an object is collected."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from ddpstats import StatsReducer, all_ranks, any_rank
from ddpstats.errors import ConfigError, RankMissing
from ddpstats.testing import RankPool

LIMIT_SEC = 60.0
TIMEOUT_SEC = 30.0


@contextmanager
def alarm_in(seconds: float, handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def tried_in_a_handler(kind: str, used_before: bool) -> list[Any]:
    """Rank 0 is interrupted while it waits for rank 1, and its handler asks for something on the same group."""
    group = dist.new_group()
    reducer = StatsReducer(group=group, timeout_sec=TIMEOUT_SEC)
    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: reducer({"late": 1.0}),
        "another reducer": lambda: StatsReducer(group=group, name="other", timeout_sec=TIMEOUT_SEC)({"a": 1.0}),
        "start": lambda: reducer.start({"late": 1.0}).result(),
        "any_rank": lambda: any_rank(True, group=group),
        "all_ranks": lambda: all_ranks(True, group=group),
    }
    said: list[Any] = []

    def handler(*_: Any) -> None:
        started = time.monotonic()
        try:
            calls[kind]()
        except ConfigError as error:
            said.append((str(error), time.monotonic() - started < 1.0))

    if used_before:
        reducer({"v": 0.0})
    if dist.get_rank() == 1:
        time.sleep(2.0)
        found = reducer({"v": 3.0}).values
    else:
        with alarm_in(0.7, handler):
            found = reducer({"v": 1.0}).values
    if kind == "start" and dist.get_rank() == 1:
        reducer({"late": 1.0})  # what rank 0 started there has its turn, whoever waits for it
    return [found, said, reducer({"v": 1.0}).values["v"]]


@pytest.mark.parametrize("used_before", [True, False], ids=["later", "first use"])
@pytest.mark.parametrize("kind", ["reduce", "another reducer", "start", "any_rank", "all_ranks"])
def test_it_is_refused_at_once_and_the_first_goes_on(kind: str, used_before: bool, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(tried_in_a_handler, kind, used_before, timeout_sec=LIMIT_SEC).values()
    assert [first[0], first[2]] == [second[0], second[2]] == [{"v": 2.0}, 1.0]
    ((text, at_once),) = first[1]
    assert at_once
    assert "in the middle of another one, on the same thread" in text
    assert "Set a flag" in text


def let_it_pass() -> tuple[str, str]:
    group = dist.new_group()
    reducer = StatsReducer(group=group, timeout_sec=TIMEOUT_SEC)
    reducer({"v": 0.0})

    def handler(*_: Any) -> None:
        reducer({"late": 1.0})

    try:
        if dist.get_rank() == 1:
            time.sleep(2.0)
            reducer({"v": 1.0})  # rank 0 has handed in its numbers: this one may succeed
            reducer({"v": 1.0})
        else:
            with alarm_in(0.7, handler):
                reducer({"v": 1.0})
    except (ConfigError, RankMissing) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_handler_that_lets_it_pass_ends_the_reduction_for_all(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(let_it_pass, timeout_sec=LIMIT_SEC).values()
    assert "in the middle of another one" in first[1]
    assert "rank 0: left in the middle of it" in second[1]


def on_another_group() -> list[Any]:
    groups = [dist.new_group(), dist.new_group()]
    outer, inner = (StatsReducer(group=group, timeout_sec=TIMEOUT_SEC) for group in groups)
    said: list[Any] = []

    def handler(*_: Any) -> None:
        said.append(inner({"v": float(dist.get_rank())}).values)

    if dist.get_rank() == 1:
        handler()
        return [outer({"v": 1.0}).values, said]
    with alarm_in(0.7, handler):
        return [outer({"v": 3.0}).values, said]


def test_on_another_group_it_works(two_ranks: RankPool) -> None:
    assert two_ranks.run(on_another_group, timeout_sec=LIMIT_SEC).values() == [[{"v": 2.0}, [{"v": 0.5}]]] * 2


def while_a_result_is_awaited() -> list[Any]:
    """The worker reduces meanwhile, and takes what the handler asks for after it."""
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC)
    said: list[Any] = []

    def handler(*_: Any) -> None:
        said.append(reducer({"late": float(dist.get_rank())}).values)

    pending = None
    if dist.get_rank() == 1:
        time.sleep(1.5)
        pending = reducer.start({"v": 1.0})
        handler()
    else:
        with alarm_in(0.5, handler):
            pending = reducer.start({"v": 3.0})
            pending.result()
    values = pending.result().values
    reducer.close()
    return [values, said]


def test_while_a_started_one_is_awaited_it_has_its_turn(two_ranks: RankPool) -> None:
    found = two_ranks.run(while_a_result_is_awaited, timeout_sec=LIMIT_SEC).values()
    assert found == [[{"v": 2.0}, [{"late": 0.5}]]] * 2


class Collected:
    """Reduces when it is collected, as a logger that is closed by its finalizer may."""

    def __init__(self, reducer: StatsReducer, said: list[str]) -> None:
        self._reducer, self._said = reducer, said

    def __del__(self) -> None:
        try:
            self._reducer({"late": 1.0})
        except ConfigError as error:
            self._said.append(str(error))


def in_a_finalizer() -> list[Any]:
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=TIMEOUT_SEC)
    reducer({"v": 0.0})
    said: list[str] = []
    kept = [Collected(reducer, said)]

    def handler(*_: Any) -> None:
        kept.clear()

    if dist.get_rank() == 1:
        time.sleep(1.5)
        kept[0]._reducer = StatsReducer(group=dist.new_group([1]))
        return [reducer({"v": 1.0}).values, 1]
    dist.new_group([1])
    with alarm_in(0.5, handler):
        return [reducer({"v": 1.0}).values, len(said)]


def test_in_a_finalizer_it_is_refused_as_well(two_ranks: RankPool) -> None:
    assert two_ranks.run(in_a_finalizer, timeout_sec=LIMIT_SEC).values() == [[{"v": 1.0}, 1]] * 2
