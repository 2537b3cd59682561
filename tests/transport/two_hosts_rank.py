"""One rank of two hosts; the link between them goes down once a file is there. Run by `test_two_hosts`.

python -m tests.transport.two_hosts_rank RANK WORLD_SIZE ADDRESS PORT PHASE DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from tests.transport.store_host_rank import attempt, guarded_call

TIMEOUT_SEC = 8.0
STEPS = 40


def call_of(phase: str, directory: Path) -> Callable[[], Any]:
    """What is called before and after the link goes down."""
    mode, _, name = phase.partition(" ")
    if mode in ("strict", "step"):
        return guarded_call(mode, name, TIMEOUT_SEC)
    if phase == "NaNCapture.check":
        return ddpstats.NaNCapture(directory, model=torch.nn.Linear(2, 1)).check
    reducer = ddpstats.StatsReducer()
    return lambda: reducer({"a": 1.0})


def over_a_bad_link(rank: int, directory: Path) -> tuple[float, int]:
    """Some steps, each with its right result: seconds of the longest, and collectives that the guard compared."""
    os.environ["DDPSTATS_TIMEOUT_SEC"] = "60"
    reducer, window, longest_sec = ddpstats.StatsReducer(), ddpstats.StatsWindow(), 0.0
    with ddpstats.collective_guard("step", check_every=8) as guard:
        for step in range(STEPS):
            started = time.monotonic()
            if step == STEPS // 2:
                (directory / f"ready{rank}").touch()
            own = f"of {rank}, {step // 10}"  # a key that is new now and then
            window.add({"loss": float(rank)})
            found = reducer({"loss": float(step + rank), own: 1.0}).flat()
            assert found == {"loss": step + 0.5, f"of 0, {step // 10}": 1.0, f"of 1, {step // 10}": 1.0}
            dist.all_reduce(torch.ones(1))
            if step % 10 == 9:
                guard.step()
                assert window.flush().flat() == {"loss": 0.5}
            longest_sec = max(longest_sec, time.monotonic() - started)
        return longest_sec, guard.counters.compared


def with_a_late_rank(rank: int) -> tuple[int, dict[str, float]]:
    """This process's number, and a reduction for which rank 0 waits."""
    reducer = ddpstats.StatsReducer()
    reducer({"a": 1.0})
    time.sleep(2.0 * rank)
    return os.getpid(), reducer({"a": float(rank)}).flat()


def main(rank: int, world_size: int, address: str, port: str, phase: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(TIMEOUT_SEC)
    if phase == "own pids":
        print(json.dumps(with_a_late_rank(rank)), flush=True)
        return
    if phase == "bad link":
        print(json.dumps(over_a_bad_link(rank, directory)), flush=True)
        return
    call = call_of(phase, directory)
    if phase in ("between", "during", "NaNCapture.check"):
        call()
    if phase.startswith(("strict", "step")):
        time.sleep(2.0)  # a guard learns beside the program where the ranks are
    (directory / f"ready{rank}").touch()
    if phase != "during":
        while not (directory / "down").exists():
            time.sleep(0.05)
    elif rank == 0:
        time.sleep(3600)  # stays away, and is killed in the end
    print(json.dumps([attempt(call), attempt(call)]), flush=True)
    if phase.startswith(("strict", "step")):
        call()  # nobody catches it: the process ends, although gloo would wait for the other rank until its timeout


if __name__ == "__main__":
    address, port, phase, directory = sys.argv[3:]
    main(int(sys.argv[1]), int(sys.argv[2]), address, port, phase, Path(directory))
