"""Programs for the ranks of `test_timeouts`: a rank stays away from a collective; others catch torch's error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddpstats import DdpstatsError
from ddpstats.guard import collective_guard, notes_shm
from ddpstats.guard.group import GuardMode

LIMIT_SEC = 2.0
Ending = tuple[str, float, str]
"""The type of what a rank has caught, after how many seconds, and what the guard raised when it was left."""


def _wait_with_limit(group: Any) -> None:
    work: Any = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait(timedelta(seconds=LIMIT_SEC))


def _wait(group: Any) -> None:
    work: Any = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()


def _wait_for_limited_call(group: Any) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=LIMIT_SEC)
    work = group.allreduce([torch.ones(1)], options)
    options.timeout = timedelta(minutes=1)  # of no consequence: torch has copied them
    work.wait()


CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(group),
    "async": _wait,
    "all_gather": lambda group: dist.all_gather([torch.ones(1)] * group.size(), torch.ones(1), group=group),
    "wait(timeout)": _wait_with_limit,
    "options with timeout": _wait_for_limited_call,
    "monitored_barrier(timeout)": lambda group: dist.monitored_barrier(group, timedelta(seconds=LIMIT_SEC)),
}


def stays_away(
    mode: GuardMode | None, call: str, absent: int, limited_group: bool, guard_sec: float | None = None
) -> Ending:
    """The group's timeout is two seconds, or the call's own is. The rank ``absent`` makes no such call."""
    limit = timedelta(seconds=LIMIT_SEC) if limited_group else timedelta(minutes=1)
    group = dist.new_group(timeout=limit)
    ending: Ending = "nothing", 0.0, "nothing"
    store = dist.distributed_c10d._get_default_store()
    try:
        with _guard(mode, guard_sec):
            dist.all_reduce(torch.ones(1))
            started = time.monotonic()
            if dist.get_rank() != absent:
                try:
                    CALLS[call](group)
                except Exception as error:
                    ending = type(error).__name__, time.monotonic() - started, "nothing"
            store.set(f"tried {dist.get_rank()}", "")
            store.wait([f"tried {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=30))
            dist.all_reduce(torch.ones(1))
    except DdpstatsError as error:
        return *ending[:2], f"{type(error).__name__}: {error}"
    return ending


def default_group_is_limited(mode: GuardMode | None, directory: str) -> Ending:
    """Rank 1 never comes to the second collective of a default group whose timeout is two seconds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    limit = timedelta(seconds=LIMIT_SEC)
    meeting = (Path(directory) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=limit)
    guard = _guard(mode)
    guard.__enter__()
    dist.all_reduce(torch.ones(1))
    started, ending = time.monotonic(), ("nothing", 0.0, "nothing")
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            ending = type(error).__name__, time.monotonic() - started, str(error) + "".join(_notes(error))
        Path(directory, "done").touch()
    while not Path(directory, "done").exists():
        time.sleep(0.05)
    if mode is not None:
        guard.abandon()
    return ending


def note_on_absence(mode: GuardMode, absent: int, without_memory: tuple[int, ...]) -> str:
    """Return the note on the timeout of a group of which these ranks share no memory with the others."""
    group, note = dist.new_group(timeout=timedelta(seconds=LIMIT_SEC)), ""
    store, refused = dist.distributed_c10d._get_default_store(), OSError("no shared memory here")
    has_none = dist.get_rank() in without_memory
    with (
        mock.patch.object(notes_shm._SharedMemory, "of", side_effect=refused) if has_none else nullcontext(),
        _guard(mode),
    ):
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() != absent:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as error:
                note = "".join(_notes(error))
        store.set(f"noted {dist.get_rank()}", "")
        store.wait([f"noted {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=30))
    return note


def dies(mode: GuardMode, absent: int) -> tuple[str, bool]:
    """What is raised where a rank is killed, and whether a program that catches RuntimeError catches it."""
    with _guard(mode):
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == absent:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return type(error).__name__, True
        except Exception as error:
            return type(error).__name__, False
    return "nothing", False


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _guard(mode: GuardMode | None, timeout_sec: float | None = None) -> Any:
    return collective_guard(mode or "off", timeout_sec=timeout_sec)
