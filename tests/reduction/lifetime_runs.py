"""What runs on the ranks of `test_lifetimes`."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import ddpstats
from ddpstats import Max, StatsReducer, reduce_stats
from ddpstats._ranks import calls
from ddpstats.testing import die


def threads() -> list[str]:
    """Ours, once those that are about to end have had the time to."""
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline and any(thread.name == "ddpstats" for thread in threading.enumerate()):
        time.sleep(0.01)
    return [thread.name for thread in threading.enumerate() if thread.name == "ddpstats"]


def dropped_reducers() -> tuple[list[Any], list[str]]:
    """As in ``return StatsReducer(...).start(stats)``: the reducer is gone before its reduction is done."""
    found = []
    for i in range(30):
        pending = [StatsReducer(name=name, timeout_sec=20).start({name: float(i)}) for name in ("a", "b", "c")]
        found.append([one.result().values for one in pending])
    return found, threads()


def late_peer() -> Any:
    """Rank 1 is later than the other rank looks again whether its result can still come."""
    reduce_stats({"a": 1.0})
    with mock.patch.object(calls, "_POLL_SEC", 0.05):
        if dist.get_rank() == 1:
            time.sleep(1)
        return StatsReducer(name="late", timeout_sec=30).start({"x": 1.0}).result().values


def two_threads() -> list[str]:
    """Two threads of rank 0 reduce at once, so that one of them queues behind the other."""
    reduce_stats({"a": 1.0})
    if dist.get_rank() == 0:
        both = [threading.Thread(target=reduce_stats, args=({"a": 1.0},)) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(45)
    else:
        time.sleep(1)
        reduce_stats({"a": 1.0})
        reduce_stats({"a": 1.0})
    return threads()


def other_default_device() -> Any:
    """A program whose new tensors are made elsewhere, as under ``torch.set_default_device("cuda")``."""
    with torch.device("meta"):
        total = ddpstats.recursive_average({"l": torch.ones(1, device="cpu")}, torch.ones(1, device="cpu"), True)[1]
        return reduce_stats({"m": Max(float(dist.get_rank())), "l": 1.0}, name="device").values, str(total.device)


def alone_with_a_fault() -> list[tuple[int, ...]]:
    """Errors of a group of one name this process's own rank."""
    group: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = []
    for call in (
        lambda: reduce_stats({"a": "text"}, group=group),
        lambda: ddpstats.recursive_average({"a": "text"}, torch.ones(1)),
        lambda: reduce_stats({"a": float("nan")}, group=group, nonfinite="raise"),
    ):
        with contextlib.suppress(ZeroDivisionError):
            try:
                call()
            except ddpstats.DdpstatsError as error:
                found.append(error.ranks)
    return found


def killed_store_host() -> Any:
    """Rank 0 serves the store, reduces once and is killed; what the others see at their next two calls."""
    rank = dist.get_rank()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([0 if store is None else store.port])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    store = store or TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    reducer = StatsReducer(name="store", timeout_sec=10)
    reducer({"a": 1.0})
    if rank == 0:
        die()
    started, found = time.monotonic(), []
    for _ in range(2):
        try:
            reducer({"a": 1.0})
        except ddpstats.RankMissing as error:
            found.append(error)
    first, again = found
    return type(first).__name__, first.missing_ranks, str(first), type(again).__name__, time.monotonic() - started


_kept: list[Any] = []


def left_pending(count: int) -> None:
    """Leaves the process with a reduction that nobody collected, and its reducer alive."""
    reducer = StatsReducer(name="pending")
    stats = {f"k{i}": 1.0 for i in range(count)}
    reducer(stats)
    _kept.extend((reducer, reducer.start(stats)))


def names_of_the_drop_in() -> Any:
    """A user's name that is spelled like the drop-in is not its."""
    given = torch.ones(1, dtype=torch.float16 if dist.get_rank() else torch.float32)
    ddpstats.recursive_average({"a": given}, torch.ones(1), True)
    return reduce_stats({"a": 1.0}, name="recursive_average").values


def conflicts_on_six_paths() -> Any:
    """Which ranks a conflict names: under the sixth path it is rank 2 that differs."""
    rank = dist.get_rank()
    stats: dict[str, Any] = {f"k{i}": [1.0] if rank == 1 else 1.0 for i in range(5)}
    stats["k5"] = [1.0] if rank == 2 else 1.0
    found = []
    for what in (stats, [1.0] if rank == 1 else {"a": 1.0}):
        try:
            reduce_stats(what)
        except ddpstats.SchemaConflict as error:
            found.append((str(error), error.ranks, error.path, error.group))
    return found
