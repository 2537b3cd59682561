"""A reduction in the middle of another one, as in a signal's handler, is refused at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from ddpstats import StatsReducer, any_rank
from ddpstats.errors import ConfigError, RankMissing
from ddpstats.testing import RankPool
from tests import programs

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


def call_in_handler(kind: str, used_before: bool) -> list[Any]:
    """Interrupt rank 0 while it waits for rank 1; its handler makes a call on the same group and lets rank 1 go on."""
    group = dist.new_group()
    reducer = StatsReducer(group=group, timeout_sec=TIMEOUT_SEC)
    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: reducer({"late": 1.0}),
        "start": lambda: reducer.start({"late": 1.0}).result(),
        "any_rank": lambda: any_rank(True, group=group),
    }
    errors: list[str] = []

    def handler(*_: Any) -> None:
        try:
            calls[kind]()
        except ConfigError as error:
            errors.append(str(error))
        dist.barrier()

    if used_before:
        reducer({"v": 0.0})
    if dist.get_rank() == 1:
        dist.barrier()
        values = reducer({"v": 3.0}).values
    else:
        with alarm_in(0.3, handler):
            values = reducer({"v": 1.0}).values
    if kind == "start" and dist.get_rank() == 1:
        reducer({"late": 1.0})  # what rank 0 started there has its turn, whoever waits for it
    return [values, errors, reducer({"v": 1.0}).values["v"]]


@pytest.mark.parametrize(
    ("kind", "used_before"),
    [
        ("reduce", True),
        pytest.param("start", True, marks=pytest.mark.slow),
        pytest.param("any_rank", False, marks=pytest.mark.slow),
    ],
)
def test_call_in_handler_on_same_group_is_refused_and_the_first_goes_on(
    kind: str, used_before: bool, two_ranks: RankPool
) -> None:
    """It is refused at once: the other rank waits for the handler's end."""
    first, second = two_ranks.run(call_in_handler, kind, used_before, timeout_sec=LIMIT_SEC).values()
    assert [first[0], first[2]] == [second[0], second[2]] == [{"v": 2.0}, 1.0]
    (text,) = first[1]
    assert "in the middle of another one, on the same thread" in text
    assert "Set a flag" in text


def let_it_pass() -> tuple[str, str]:
    group = dist.new_group()
    reducer = StatsReducer(group=group, timeout_sec=TIMEOUT_SEC)
    reducer({"v": 0.0})

    def handler(*_: Any) -> None:
        try:
            reducer({"late": 1.0})
        finally:
            dist.barrier()

    try:
        if dist.get_rank() == 1:
            dist.barrier()
            reducer({"v": 1.0})  # rank 0 has handed in its numbers: this one may succeed
            reducer({"v": 1.0})
        else:
            with alarm_in(0.3, handler):
                reducer({"v": 1.0})
    except (ConfigError, RankMissing) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_error_that_leaves_the_handler_ends_the_reduction_for_all(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(let_it_pass, timeout_sec=LIMIT_SEC).values()
    assert "in the middle of another one" in first[1]
    assert "rank 0: left in the middle of it" in second[1]


def on_another_group() -> list[Any]:
    groups = [dist.new_group(), dist.new_group()]
    outer, inner = (StatsReducer(group=group, timeout_sec=TIMEOUT_SEC) for group in groups)
    values: list[Any] = []

    def handler(*_: Any) -> None:
        values.append(inner({"v": float(dist.get_rank())}).values)

    if dist.get_rank() == 1:
        handler()
        return [outer({"v": 1.0}).values, values]
    with alarm_in(0.3, handler):
        return [outer({"v": 3.0}).values, values]


@pytest.mark.slow
def test_call_in_handler_on_another_group_works(two_ranks: RankPool) -> None:
    assert two_ranks.run(on_another_group, timeout_sec=LIMIT_SEC).values() == [[{"v": 2.0}, [{"v": 0.5}]]] * 2


INTERRUPTED = """
import random, signal, time
from ddpstats import StatsReducer

reducer, random = StatsReducer(), random.Random(0)
reducer({"loss": 1.0})
end, interrupts = time.monotonic() + 3, 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
        while True:
            reducer({"loss": 1.0})
    except KeyboardInterrupt:
        interrupts += 1
    assert reducer({"loss": 2.0}).values == {"loss": 2.0}
assert interrupts > 50
"""

FORKED = """
import os, threading, time
from ddpstats import StatsReducer
from ddpstats._ranks import calls

reducer, is_inside, may_end = StatsReducer(), threading.Event(), threading.Event()
reducer({"loss": 1.0})

def stay(agreement):
    is_inside.set()
    may_end.wait()

thread = threading.Thread(target=lambda: calls._alone[0].run(stay, 30.0))
thread.start()
is_inside.wait()
child = os.fork()
if child == 0:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # or the worker gets the ident of that thread
    os._exit(0 if reducer({"loss": 2.0}).values == {"loss": 2.0} else 1)
may_end.set()
thread.join()
assert os.waitpid(child, 0)[1] == 0
"""

IN_A_HANDLER_BEHIND_ANOTHER_THREAD = """
import os, random, signal, sys, threading, time
from ddpstats import ConfigError, StatsReducer

reducer, random, is_over = StatsReducer(), random.Random(0), threading.Event()

def handler(*_):
    try:
        reducer({"loss": 1.0})
    except ConfigError:
        pass
    if not is_over.is_set():
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, 2e-3))

def start_reductions():
    while not is_over.is_set():
        reducer.start({"loss": 1.0})
        time.sleep(1e-4)

sys.setswitchinterval(1e-4)
thread = threading.Thread(target=start_reductions)
thread.start()
signal.signal(signal.SIGALRM, handler)
handler()
end = time.monotonic() + 8
while time.monotonic() < end:
    reducer({"loss": 1.0})
is_over.set()
thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [INTERRUPTED, FORKED, IN_A_HANDLER_BEHIND_ANOTHER_THREAD], ids=range(3))
def test_a_turn_is_given_back_whatever_interrupts_it(script: str) -> None:
    done = programs.run(["-c", script], timeout=LIMIT_SEC)
    assert done.returncode == 0, done.stderr
