"""What runs on ranks whose rank 0 serves the store and is lost, and the checks of what the others raise."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ddpstats
from ddpstats.errors import DdpstatsError
from tests.ranks.processes import wait_until_ended

TIMEOUT_SEC = 4.0
STORE_TIMEOUT_SEC = 20.0
LIMIT_SEC = 2 * TIMEOUT_SEC + 5.0

Calls = Mapping[str, Callable[[], Any]]


class Attempt(NamedTuple):
    """The outcome of a call. ``raised``: the name of a ddpstats error's class, or the repr of another class."""

    raised: str | None
    text: str
    missing: list[int]
    after_sec: float


class Survivor(NamedTuple):
    """One rank's outcomes of the calls and of the same calls again, and the store's threads left at the end."""

    first: dict[str, Attempt]
    again: dict[str, Attempt]
    left: list[str]


def attempt(call: Callable[[], Any]) -> Attempt:
    started = time.monotonic()
    try:
        value = str(call())
    except Exception as error:
        raised = type(error).__name__ if isinstance(error, DdpstatsError) else repr(type(error))
        missing = list(getattr(error, "missing_ranks", ()))
        return Attempt(raised, str(error), missing, time.monotonic() - started)
    return Attempt(None, value, [], time.monotonic() - started)


def reductions() -> Calls:
    """Return a call of each kind, on groups of their own, so that none knows of another's failure."""
    groups = {name: dist.new_group() for name in ("reduce_stats", "start", "any_rank", "recursive_average")}
    reducer = ddpstats.StatsReducer(group=groups["start"])
    ones = torch.tensor(1.0)
    return {
        "reduce_stats": lambda: ddpstats.reduce_stats({"a": 1.0}, group=groups["reduce_stats"]),
        "start": lambda: reducer.start({"a": 1.0}).result(),
        "any_rank": lambda: ddpstats.any_rank(True, group=groups["any_rank"]),
        "recursive_average": lambda: ddpstats.recursive_average(
            {"a": ones}, ones, True, group=groups["recursive_average"]
        ),
    }


def serve_anew(port: int) -> int:
    """On a rank of `run_ranks`: join another default group, whose store rank 0 serves. Returns the rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # no rank leaves while another one still connects
    dist.destroy_process_group()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # otherwise rank 0 is a client as well
    serve(rank, world_size, port)
    return rank


def serve(rank: int, world_size: int, port: int, timeout_sec: float = TIMEOUT_SEC) -> None:
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(timeout_sec)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=STORE_TIMEOUT_SEC),
    )


def kill_rank(victim: int, calls: Calls, phase: str) -> Survivor:
    """Kill the victim "before" the calls' first use, "between" two or "during" one; return what the others raise.

    "guarded" is "between", but for calls that cannot be made twice.
    """
    if phase not in ("before", "guarded"):
        for call in calls.values():
            call()
    pid = pid_of(victim)
    if dist.get_rank() == victim:
        if phase == "during":
            time.sleep(1.0)  # for the others to be in the call: where they are not, this is "between"
        os.kill(os.getpid(), signal.SIGKILL)
    if phase != "during":
        wait_until_ended(pid)
    return survive(calls)


def pid_of(rank: int) -> int:
    """Return the rank's process id on every rank; all ranks must call."""
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, rank)
    dist.barrier()
    return int(pid)


def survive(calls: Calls) -> Survivor:
    first = {name: attempt(call) for name, call in calls.items()}
    again = {name: attempt(call) for name, call in calls.items()}
    # They end a moment after their last request. One that connects to the dead store has the store's own timeout.
    deadline = time.monotonic() + 3 * STORE_TIMEOUT_SEC
    while (left := _store_threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return Survivor(first, again, left)


def _store_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ddpstats-store"]


def lose_rank_0(port: int, phase: str) -> Survivor:
    serve_anew(port)
    return kill_rank(0, reductions(), phase)


def end_group_while_waiting(port: int) -> Attempt:
    """Rank 1 dies, and the launcher ends rank 0's group while its reduction waits, as Ray Train does."""
    rank = serve_anew(port)
    with ddpstats.StatsReducer() as reducer:
        reducer({"a": 1.0})
        pid = pid_of(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until_ended(pid)
        waiting = reducer.start({"a": 1.0})
        dist.destroy_process_group()
        return attempt(waiting.result)


def stop_rank_0(port: int) -> Attempt:
    """Rank 0 is stopped, and goes on when rank 1 has given up."""
    rank = serve_anew(port)
    with ddpstats.StatsReducer() as reducer:
        reducer({"a": 1.0})
        pid = pid_of(0)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        result = attempt(lambda: reducer({"a": 1.0}))
        if rank == 1:
            time.sleep(1.0)  # for rank 2, which gives up at the same time
            os.kill(pid, signal.SIGCONT)
        return result


LOST_STORE = (
    "rank 0: is gone, and the store with it",
    "rank 0: serves the store no more",
    "rank 0: serves the store, which does not answer",
)
"""What a rank sees alone, of a rank on its host, of another one, and before it was ever connected."""


def check(survivors: list[Survivor]) -> None:
    """Assert that every call raised a `RankMissing` that names rank 0, the same when it was called again, in time."""
    for name in survivors[0].first:
        attempts = [calls[name] for survivor in survivors for calls in (survivor.first, survivor.again)]
        assert {attempt.raised for attempt in attempts} == {"RankMissing"}, (name, attempts)
        assert {tuple(attempt.missing) for attempt in attempts} == {(0,)}, (name, attempts)
        assert all(any(text in attempt.text for text in LOST_STORE) for attempt in attempts), (name, attempts)
        assert all(survivor.first[name].text == survivor.again[name].text for survivor in survivors), (name, attempts)
        assert max(attempt.after_sec for attempt in attempts) < LIMIT_SEC, (name, attempts)
    assert [survivor.left for survivor in survivors] == [[]] * len(survivors)
