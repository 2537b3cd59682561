"""What a gloo group costs a real rank: seconds and processor time to connect it, memory, file descriptors, one call.

All ranks are processes of this machine, forked from this one: they have torch already, and nothing else is measured.
"""

from __future__ import annotations

import json
import os
import resource
import select
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._transport import gloo_group

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
    lazy: bool
    median: Connected
    slowest_sec: float


def measure(world_size: int, lazy: bool = False) -> World:
    """Connect so many ranks on this machine, and reduce a little. ``lazy``: gloo connects a pair when it is used."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_SEC), wait_for_workers=False)
    found = _forked(world_size, lambda rank: _play(rank, world_size, server.port, lazy))
    columns = zip(*map(astuple, found), strict=True)
    median = Connected(*map(statistics.median, columns))
    return World(world_size, lazy, median, max(one.connect_sec for one in found))


def store_request_us(requests: int = 5000) -> float:
    """Processor time that the process which serves a `TCPStore` takes for one request of ours."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_SEC), wait_for_workers=False)

    def ask(rank: int) -> Connected:
        store = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=LIMIT_SEC))
        for number in range(requests):
            store.check([f"key/{number}"])
        return Connected(0.0, 0.0, 0, 0, 0, 0.0, 0.0)

    before = _cpu_ms()
    _forked(1, ask)
    return 1e3 * (_cpu_ms() - before) / requests


def _play(rank: int, world_size: int, port: int, lazy: bool) -> Connected:
    import torch

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT_SEC), wait_for_workers=False)
    _meet(store, "start", world_size)
    before = _private_kib(), len(os.listdir("/proc/self/fd")), _cpu_ms(), time.monotonic()
    part = dist.distributed_c10d.PrefixStore("gloo", store)
    gloo_group.LAZY_FROM_RANKS = 2 if lazy else world_size + 1
    backend = gloo_group.gloo_backend(part, rank, world_size, LIMIT_SEC)
    group = gloo_group.group_around(backend, part, rank, world_size, gloo_group.OWN_GROUP)
    connect_sec, connect_cpu_ms = time.monotonic() - before[3], _cpu_ms() - before[2]
    tensor, options = torch.ones(_LANES, dtype=torch.float64), dist.AllreduceOptions()
    for _ in range(_WARM_CALLS):
        group.allreduce([tensor], options).wait()
    private_kib, files = _private_kib() - before[0], len(os.listdir("/proc/self/fd")) - before[1]
    _meet(store, "connected", world_size)
    cpu_ms, calls = _cpu_ms(), list[float]()
    for _ in range(CALLS):
        started = time.monotonic()
        group.allreduce([tensor], options).wait()
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


def _forked(world_size: int, play: Callable[[int], Connected]) -> Sequence[Connected]:
    """What ``play`` returns on each rank, each in a process of its own; none is left behind."""
    ranks, told = dict[int, int](), list[Connected]()
    try:
        for rank in range(world_size):
            mine, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                with suppress(BaseException):
                    os.write(theirs, json.dumps(asdict(play(rank))).encode())
                    status = 0
                os._exit(status)
            os.close(theirs)
            ranks[pid] = mine
        deadline = time.monotonic() + LIMIT_SEC
        for pipe in ranks.values():
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            payload = os.read(pipe, 1 << 16) if ready else b""
            if not payload:
                raise RuntimeError(f"a rank of {world_size} did not connect")
            told.append(Connected(**json.loads(payload)))
        return told
    finally:
        for pid, pipe in ranks.items():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(pipe)
