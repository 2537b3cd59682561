"""Ranks on two hosts, which are two network namespaces: starts them, and is the program that each of them runs.

    python -m tests.ranks.two_hosts RANK WORLD_SIZE PORT DIRECTORY MODULE:FUNCTION ARGUMENTS...

The function is called with the directory and the arguments; what it returns is printed as JSON. Rank 0 is on the first
host, and serves the store there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from tests.hosts import NEAR, Hosts, ip
from tests.programs import Program
from tests.ranks.store_host_runs import Attempt, attempt

LIMIT_SEC = 100.0
TIMEOUT_SEC = 6.0
KILLED_AFTER_SEC = 1.0
_PORT = "29511"  # in a network namespace of the test's own


def start_rank(
    space: str,
    link: str,
    rank: int,
    ranks: int,
    directory: Path,
    function: str,
    *arguments: str,
    container: Sequence[str] = (),
) -> Program:
    """Start a rank in that namespace. ``container``: a command that starts its interpreter in a container."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": link, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = ["-m", "tests.ranks.two_hosts", str(rank), str(ranks), _PORT, str(directory), function, *arguments]
    return Program(command, environ, prefix=["ip", "netns", "exec", space, *container])


@contextlib.contextmanager
def killed_at_end(programs: Sequence[Program]) -> Iterator[None]:
    try:
        yield
    finally:
        for program in programs:
            program.kill()


@contextlib.contextmanager
def all_ready(programs: Sequence[Program], directory: Path) -> Iterator[None]:
    """Wait until every rank has called `say_ready`; kill them at the end."""
    with killed_at_end(programs):
        deadline = time.monotonic() + LIMIT_SEC
        while len(list(directory.glob("ready*"))) < len(programs):
            assert time.monotonic() < deadline, "the ranks do not come up"
            assert all(program.poll() is None for program in programs), [program.errors() for program in programs]
            time.sleep(0.1)
        yield


def lose_link(hosts: Hosts, ranks: int, directory: Path, function: str, *arguments: str) -> list[list[Attempt] | None]:
    """Take the link down when all ranks are ready, and return what each prints. All ranks but 0 are on the far host."""
    near, far, near_link, far_link = hosts
    programs = [start_rank(near, near_link, 0, ranks, directory, function, *arguments)]
    programs += [start_rank(far, far_link, rank, ranks, directory, function, *arguments) for rank in range(1, ranks)]
    with all_ready(programs, directory):
        ip("-n", near, "link", "set", near_link, "down")
        (directory / "down").touch()
        printed = [program.finish(LIMIT_SEC).stdout for program in programs]
    return [None if not text else [Attempt(*values) for values in json.loads(text)] for text in printed]


# -- on a rank --------------------------------------------------------------------------------------------------------


def say_ready(directory: Path) -> None:
    (directory / f"ready{dist.get_rank()}").touch()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.05)


def call_before_and_after(directory: Path, call: Callable[[], Any]) -> list[Attempt]:
    """Make the call while the link is up, and twice when it is down."""
    call()
    say_ready(directory)
    wait_for(directory / "down")
    return [attempt(call), attempt(call)]


def reduce_before_and_after(directory: Path) -> list[Attempt]:
    reducer = ddpstats.StatsReducer()
    return call_before_and_after(directory, lambda: reducer({"a": 1.0}))


def lose_rank_1(directory: Path) -> list[Attempt]:
    """Kill rank 1 while rank 0 waits. Rank 2 comes late, and rank 0 stays until then, for it serves the store."""
    reducer = ddpstats.StatsReducer(timeout_sec=LIMIT_SEC)
    reducer({"a": 1.0})
    if dist.get_rank() == 1:
        time.sleep(KILLED_AFTER_SEC)
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        wait_for(directory / "raised")
    missed = attempt(lambda: reducer({"a": 1.0}))
    (directory / ("raised" if dist.get_rank() == 0 else "down")).touch()
    wait_for(directory / "down")
    return [missed]


def main(rank: int, world_size: int, port: str, directory: Path, name: str, arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{NEAR}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(TIMEOUT_SEC)
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(module), function)(directory, *arguments)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5], sys.argv[6:])
