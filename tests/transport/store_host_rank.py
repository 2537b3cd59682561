"""One rank of a job whose rank 0 serves the store and dies: what the others are told. Run by `test_store_host`.

python -m tests.transport.store_host_rank RANK WORLD_SIZE PORT PHASE VICTIM
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats.errors import DdpstatsError

TIMEOUT_SEC = 6.0


def calls() -> dict[str, Callable[[], Any]]:
    """Each on a group of its own, so that none is told by another one."""
    groups = {
        name: dist.new_group() for name in ("start", "any_rank", "all_ranks", "recursive_average", "reduce_stats")
    }
    starter = ddpstats.StatsReducer(group=groups["start"])
    return {
        "reduce_stats": lambda: ddpstats.reduce_stats({"a": 1.0}, group=groups["reduce_stats"]),
        "start": lambda: starter.start({"a": 1.0}).result(),
        "any_rank": lambda: ddpstats.any_rank(True, group=groups["any_rank"]),
        "all_ranks": lambda: ddpstats.all_ranks(True, group=groups["all_ranks"]),
        "recursive_average": lambda: ddpstats.recursive_average(
            {"a": torch.tensor(1.0)}, torch.tensor(1.0), True, group=groups["recursive_average"]
        ),
    }


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        value = str(call())
        return {"raised": None, "text": value, "missing": [], "after_sec": time.monotonic() - started}
    except Exception as error:
        return {
            "raised": type(error).__name__ if isinstance(error, DdpstatsError) else repr(type(error)),
            "text": str(error),
            "missing": list(getattr(error, "missing_ranks", ())),
            "after_sec": time.monotonic() - started,
        }


def guarded(mode: Any) -> Callable[[], Any]:
    """A group whose collectives are watched from now on; the next one, and what the guard says of it on leaving."""
    group = dist.new_group()
    guard = ddpstats.collective_guard(mode, timeout_sec=TIMEOUT_SEC)
    guard.__enter__()
    for watched in (group, None):
        dist.all_reduce(torch.ones(1), group=watched)
    found: list[BaseException] = []

    def call() -> None:
        if found:
            raise found[0]
        try:
            with contextlib.ExitStack() as leaving:
                leaving.push(guard)
                dist.all_reduce(torch.ones(1), group=group)
                guard.step()
        except BaseException as error:
            found.append(error)
            raise

    return call


def main(rank: int, world_size: int, port: int, phase: str, victim: int) -> None:
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(TIMEOUT_SEC)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    todo = {phase: guarded(phase)} if phase in ("strict", "step") else calls()
    if phase not in ("before", "strict", "step"):
        for call in todo.values():
            call()
    dist.barrier()
    if rank == victim:
        time.sleep(0.5)  # for whoever still sets things up
        if phase == "during":
            time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if phase != "during":
        time.sleep(1.0)
    told = {name: attempt(call) for name, call in todo.items()}
    again = {name: attempt(call) for name, call in todo.items()}
    left = [thread.name for thread in threading.enumerate() if thread.name == "ddpstats-store"]
    print(json.dumps({"told": told, "again": again, "left": left}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
