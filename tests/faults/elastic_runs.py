"""What runs on the ranks of `test_elastic`: groups that come and go."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats._ranks import calls
from tests.threads import lasting_threads


def held() -> dict[str, int]:
    """What this process holds, once what ends by itself has ended."""
    gc.collect()
    lasting_threads()
    deadline = time.monotonic() + 10
    while any(thread.name == "ddpstats" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "channels": len(calls._channels),
        "kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def many_subgroups(count: int) -> list[dict[str, int]]:
    """What is held after half of them, and after all; a guard keeps the last 64."""
    found = []
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
                found.append(held())
    return found


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
    rank, world_size, found = dist.get_rank(), dist.get_world_size(), []
    for life in range(2):
        found += [step(), step(), step(bad=True), ddpstats.reduce_stats({"loss": float(rank)}).values]
        found.append(kept.start({"loss": float(rank)}).result().values)
        dist.destroy_process_group()
        found.append(kept({"loss": float(rank)}).values == {"loss": float(rank)})  # alone for now
        client = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.init_process_group("gloo", store=PrefixStore(f"{life}", client), rank=rank, world_size=world_size)
    found.append(step())
    step(end=True)
    kept.close()
    return found
