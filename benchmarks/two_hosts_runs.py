"""What runs on the ranks of `test_two_hosts`; each function is one of `tests/ranks/two_hosts.py`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ddpstats
from benchmarks.store_host_runs import guarded
from tests.ranks.store_host_runs import Attempt, attempt
from tests.ranks.two_hosts import TIMEOUT_SEC, call_before_and_after, say_ready, wait_for

STEPS = 40


def reduce_for_the_first_time(directory: Path) -> list[Attempt]:
    reducer = ddpstats.StatsReducer()
    say_ready(directory)
    wait_for(directory / "down")
    return [attempt(lambda: reducer({"a": 1.0})) for _ in range(2)]


def wait_for_rank_0(directory: Path) -> list[Attempt]:
    """Reduce while the link goes down; rank 0 stays away."""
    reducer = ddpstats.StatsReducer()
    reducer({"a": 1.0})
    if dist.get_rank() == 0:
        time.sleep(1.0)  # the others are in their reduction when the link goes down
        say_ready(directory)
        wait_for(directory / "down")
        return []
    say_ready(directory)
    return [attempt(lambda: reducer({"a": 1.0})) for _ in range(2)]


def check_capture(directory: Path) -> list[Attempt]:
    return call_before_and_after(directory, ddpstats.NaNCapture(directory, model=torch.nn.Linear(2, 1)).check)


def call_under_guard(directory: Path, mode: str, name: str) -> None:
    """Print the attempts, and then end by the error, although gloo would wait for the other rank until its timeout."""
    (call,) = guarded(mode, name, TIMEOUT_SEC).values()
    time.sleep(2.0)  # a guard learns beside the program where the ranks are
    say_ready(directory)
    wait_for(directory / "down")
    print(json.dumps([attempt(call), attempt(call)]), flush=True)
    call()


def train_over_bad_link(directory: Path) -> tuple[float, int]:
    """Return the seconds of the longest step, and how many collectives the guard compared."""
    os.environ["DDPSTATS_TIMEOUT_SEC"] = "60"
    rank = dist.get_rank()
    reducer, window, longest_sec = ddpstats.StatsReducer(), ddpstats.StatsWindow(), 0.0
    with ddpstats.collective_guard("step", check_every=8) as guard:
        for step in range(STEPS):
            started = time.monotonic()
            if step == STEPS // 2:
                say_ready(directory)
            window.add({"loss": float(rank)})
            values = reducer({"loss": float(step + rank), f"of {rank}, {step // 10}": 1.0}).flat()
            assert values == {"loss": step + 0.5, f"of 0, {step // 10}": 1.0, f"of 1, {step // 10}": 1.0}
            dist.all_reduce(torch.ones(1))
            if step % 10 == 9:
                guard.step()
                assert window.flush().flat() == {"loss": 0.5}
            longest_sec = max(longest_sec, time.monotonic() - started)
        return longest_sec, guard.counters.compared


def wait_for_late_rank(directory: Path) -> tuple[int, dict[str, float]]:
    """Return this process's number, and a reduction for which rank 0 waits."""
    rank = dist.get_rank()
    reducer = ddpstats.StatsReducer()
    reducer({"a": 1.0})
    time.sleep(2.0 * rank)
    return os.getpid(), reducer({"a": float(rank)}).flat()
