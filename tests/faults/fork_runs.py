"""What runs on the ranks of `test_forks`: a process that a rank forks, after or before it used anything."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ddpstats


def said(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_fork(call: Callable[[], Any], leave: Callable[[int], Any]) -> tuple[str, int]:
    """What a forked process says of ``call``, and what it ends with, by ``leave``."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(there, said(call).encode())
            os.close(there)
            leave(0)
        except SystemExit:
            os._exit(_end_of_interpreter())
        except BaseException:
            traceback.print_exc()
        os._exit(9)
    os.close(there)
    with open(here, "rb") as file:
        text = file.read().decode()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_of_interpreter() -> int:
    """What a program does that ends: its exit handlers."""
    import atexit

    atexit._run_exitfuncs()
    return 0


def reduce() -> Any:
    return ddpstats.reduce_stats({"loss": float(dist.get_rank())}).values


def forked(first_use: bool) -> list[Any]:
    """A fork that reduces, starts, asks and flushes, beside a rank that goes on."""
    kept = ddpstats.StatsReducer(timeout_sec=5)
    window = ddpstats.StatsWindow(timeout_sec=5)
    window.add({"loss": 1.0})
    if not first_use:
        kept({"loss": 1.0})
        reduce()
    calls: list[Callable[[], Any]] = [
        reduce,
        lambda: kept({"loss": 100.0}).values,
        lambda: kept.start({"loss": 100.0}).result().values,
        lambda: ddpstats.any_rank(True),
        lambda: f"{said(window.flush)} Adds: {window.adds}",
    ]
    found = [in_fork(call, sys.exit) for call in calls]
    return [found, [reduce() for _ in range(3)], kept({"loss": 1.0}).values]


class Reducing(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, said(reduce)


def in_workers(watches: bool) -> list[Any]:
    """Workers of a DataLoader that reduce what they load, and others that only load."""
    guard: Any = ddpstats.collective_guard("strict" if watches else "off")
    with guard:
        found = [reduce()]
        loader = DataLoader(Reducing(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        told = [text for _, text in loader]
        dist.all_reduce(torch.ones(1))
        return [*found, told, reduce()]
