"""What our gloo groups cost a real rank: seconds and processor time to connect it, memory, file descriptors, one call.

All ranks are processes of this machine, forked from this one: they have torch already, and nothing else is measured.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._ranks.comm import GlooComm
from ddpstats._ranks.grid import GridComm
from ddpstats._ranks.store import bounded

LIMIT_SEC = 240.0
CALLS = 20
_WARM_CALLS = 3
_LANES = 64  # the smallest buffer of ours, 512 bytes


@dataclass(frozen=True)
class Connected:
    """Of one rank. ``private_kib``: memory that no other process shares; ``cpu_ms``: of all its threads.

    ``call_ms``: of the fastest all_reduce of 512 bytes, for the machine may be busy.
    """

    connect_sec: float
    connect_cpu_ms: float
    private_kib: int
    files: int
    threads: int
    call_ms: float
    call_cpu_ms: float


@dataclass(frozen=True)
class World:
    """Medians over the ranks; ``slowest_sec``: of connecting."""

    world_size: int
    grid: bool
    median: Connected
    slowest_sec: float


def measure(world_size: int, grid: bool = False) -> World:
    """Connect so many ranks on this machine, in one gloo group or in a grid, and reduce a little."""
    found = _forked(world_size, lambda rank, port: _play(rank, world_size, port, grid))
    columns = zip(*map(astuple, found), strict=True)
    median = Connected(*map(statistics.median, columns))
    return World(world_size, grid, median, max(one.connect_sec for one in found))


def store_request_us(requests: int = 5000) -> float:
    """Processor time that the process which serves a `TCPStore` takes for one request of ours."""

    def ask(rank: int, port: int) -> Connected:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT_SEC))
        for number in range(requests):
            store.check([f"key/{number}"])
        return Connected(0.0, 0.0, 0, 0, 0, 0.0, 0.0)

    before = _cpu_ms()
    _forked(1, ask)
    return 1e3 * (_cpu_ms() - before) / requests


def _play(rank: int, world_size: int, port: int, grid: bool) -> Connected:
    import torch

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT_SEC), wait_for_workers=False)
    _meet(store, "start", world_size)
    before = _private_kib(), len(os.listdir("/proc/self/fd")), _cpu_ms(), time.monotonic()
    kind = GridComm if grid else GlooComm
    comm = kind(tuple(range(world_size)), rank, bounded(store), LIMIT_SEC)
    connect_sec, connect_cpu_ms = time.monotonic() - before[3], _cpu_ms() - before[2]
    tensor = torch.ones(_LANES, dtype=torch.float64)
    for _ in range(_WARM_CALLS):
        comm.all_reduce_sum(tensor, LIMIT_SEC)
    private_kib, files = _private_kib() - before[0], len(os.listdir("/proc/self/fd")) - before[1]
    _meet(store, "connected", world_size)
    cpu_ms, calls = _cpu_ms(), list[float]()
    for _ in range(CALLS):
        started = time.monotonic()
        comm.all_reduce_sum(tensor, LIMIT_SEC)
        calls.append(1e3 * (time.monotonic() - started))
    call_cpu_ms = (_cpu_ms() - cpu_ms) / CALLS
    _meet(store, "done", world_size)
    threads = len(os.listdir("/proc/self/task")) - threading.active_count()
    return Connected(connect_sec, connect_cpu_ms, private_kib, files, threads, min(calls), call_cpu_ms)


def _meet(store: Any, where: str, world_size: int) -> None:
    if store.add(where, 1) == world_size:
        store.set(f"{where} all", "1")
    store.wait([f"{where} all"], timedelta(seconds=LIMIT_SEC))


def _cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * (used.ru_utime + used.ru_stime)


def _private_kib() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))


def _forked(world_size: int, play: Callable[[int, int], Connected]) -> Sequence[Connected]:
    """What ``play`` (of a rank, and the port of a `TCPStore`) returns, each in a process of its own; none stays.

    The store begins to serve when all are forked: a process that is forked beside its thread may find a lock taken.
    """
    ranks, told = dict[int, int](), list[Connected]()
    listening = socket.create_server(("127.0.0.1", 0), backlog=world_size)
    port = listening.getsockname()[1]
    try:
        for rank in range(world_size):
            mine, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                with suppress(BaseException):
                    os.write(theirs, json.dumps(asdict(play(rank, port))).encode())
                    status = 0
                os._exit(status)
            os.close(theirs)
            ranks[pid] = mine
        _server = TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=LIMIT_SEC),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        deadline = time.monotonic() + LIMIT_SEC
        for pipe in ranks.values():
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            payload = os.read(pipe, 1 << 16) if ready else b""
            if not payload:
                raise RuntimeError(f"a rank of {world_size} did not connect")
            told.append(Connected(**json.loads(payload)))
        return told
    finally:
        listening.close()
        for pid, pipe in ranks.items():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(pipe)
