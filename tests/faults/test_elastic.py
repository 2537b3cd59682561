"""Jobs that torchrun restarts, process groups that are made again, hundreds of subgroups: all from a clean state."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats._ranks import calls
from ddpstats.testing import run_ranks
from tests import programs
from tests.threads import lasting_threads

# -- what runs on the ranks -------------------------------------------------------------------------------------------


def held() -> dict[str, int]:
    """Return how much this process holds, once what ends by itself has ended."""
    gc.collect()
    lasting_threads()
    deadline = time.monotonic() + 10
    while any(thread.name == "ddpstats" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    threads = min(_threads_in_a_while() for _ in range(50))  # C++ may end its threads at any time
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads,
        "channels": len(calls._channels),
        "kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def _threads_in_a_while() -> int:
    time.sleep(0.02)
    return len(os.listdir("/proc/self/task"))


def many_subgroups(count: int) -> list[dict[str, int]]:
    """Return what is held after half of the groups, and after all; a guard keeps the last 64."""
    counts = []
    with ddpstats.collective_guard("step", timeout_sec=30) as guard:
        for number in range(1, count + 1):
            group: Any = dist.new_group()
            with ddpstats.StatsReducer(group=group, timeout_sec=30) as reducer:
                total = reducer({"loss": float(dist.get_rank())}).values
                assert total == {"loss": (dist.get_world_size() - 1) / 2}, total
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
            del group, reducer
            if number in (count // 2, count):
                guard.step()
                counts.append(held())
    return counts


def _checks(directory: str) -> Callable[[], Any]:
    """Capture, sentinel and guard, which stay open."""
    model = torch.nn.Linear(2, 1)
    guard = ddpstats.collective_guard("step", timeout_sec=20)
    guard.__enter__()
    capture = ddpstats.NaNCapture(directory, model=model)
    sentinel = ddpstats.Sentinel(model, mode=2)
    checks = ddpstats.StepChecks(capture=capture, sentinel=sentinel, guard=guard)

    def step(bad: bool = False, end: bool = False) -> Any:
        if end:
            capture.close()
            sentinel.close()
            guard.__exit__(None, None, None)
            return None
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan if bad and dist.get_rank() == 1 else 1.0)
        dist.all_reduce(torch.ones(1))
        return checks.step().ok

    return step


def lives(directory: str) -> list[Any]:
    """Destroy the default group and make it again, while a reducer and checks are open."""
    step: Any = _checks(directory)
    kept = ddpstats.StatsReducer()
    rank, world_size, results = dist.get_rank(), dist.get_world_size(), []
    for life in range(2):
        results += [step(), step(), step(bad=True), ddpstats.reduce_stats({"loss": float(rank)}).values]
        results.append(kept.start({"loss": float(rank)}).result().values)
        dist.destroy_process_group()
        results.append(kept({"loss": float(rank)}).values == {"loss": float(rank)})  # alone for now
        client = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.init_process_group("gloo", store=PrefixStore(f"{life}", client), rank=rank, world_size=world_size)
    results.append(step())
    step(end=True)
    kept.close()
    return results


# -- tests ------------------------------------------------------------------------------------------------------------


LIMIT_SEC = 200.0
pytestmark = pytest.mark.slow


def test_torchrun_restarts_a_job_whose_rank_died(tmp_path: Path) -> None:
    """The store still holds the keys of the attempt before, which ddpstats must not read.

    torch itself takes them for its own (2.13), so the program deletes what torch had in the store.
    """
    program = str(Path(__file__).with_name("restarted.py"))
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = programs.run([*run, program, str(tmp_path)], timeout=LIMIT_SEC, environ={"TORCH_CPP_LOG_LEVEL": "FATAL"})
    notes = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert notes["0.0"]["verdicts"] == [[1], [1]], done.stderr
    assert done.returncode == 0, (notes, done.stderr)
    for rank in ("1.0", "1.1"):
        assert notes[rank]["came"] == "all"
        assert notes[rank]["ok"]
        assert notes[rank]["values"] == {"loss": 0.5, "attempt 1": 1.0}
        assert notes[rank]["window"] == {"loss": 0.5}


def test_the_default_group_is_made_again_under_checks(tmp_path: Path) -> None:
    outcomes = run_ranks(lives, 2, str(tmp_path), timeout_sec=120.0)
    assert outcomes.values() == [[*[True, True, False, {"loss": 0.5}, {"loss": 0.5}, True] * 2, True]] * 2


def test_two_hundred_subgroups_leave_nothing_behind() -> None:
    for early, late in run_ranks(many_subgroups, 2, 200, timeout_sec=200.0).values():
        grown = late.pop("kilobytes") - early.pop("kilobytes")
        assert {what: (early[what], late[what]) for what in early if late[what] > early[what]} == {}
        assert grown < 8 * 1024, f"{grown} kB for 100 groups"
