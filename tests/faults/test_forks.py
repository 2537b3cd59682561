"""A reduction in a process that a rank forks, such as a DataLoader's worker, is a `ConfigError`, and spoils nothing."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ddpstats
from ddpstats.testing import run_ranks

# -- what runs on the ranks -------------------------------------------------------------------------------------------


def outcome_of(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_fork(call: Callable[[], Any], leave: Callable[[int], Any]) -> tuple[str, int]:
    """Return the outcome of ``call`` in a forked process that ends by ``leave``, and the status of that process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, outcome_of(call).encode())
            os.close(writer)
            leave(0)
        except SystemExit:
            os._exit(_end_of_interpreter())
        except BaseException:
            traceback.print_exc()
        os._exit(9)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_of_interpreter() -> int:
    """Run the exit handlers, as a program does that ends."""
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
        lambda: f"{outcome_of(window.flush)} Adds: {window.adds}",
    ]
    refusals = [in_fork(call, sys.exit) for call in calls]
    return [refusals, [reduce() for _ in range(3)], kept({"loss": 1.0}).values]


class Reducing(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, outcome_of(reduce)


def in_workers(watches: bool) -> list[Any]:
    """Workers of a DataLoader that reduce what they load, and others that only load."""
    guard: Any = ddpstats.collective_guard("strict" if watches else "off")
    with guard:
        before = [reduce()]
        loader = DataLoader(Reducing(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        refusals = [text for _, text in loader]
        dist.all_reduce(torch.ones(1))
        return [*before, refusals, reduce()]


# -- tests ------------------------------------------------------------------------------------------------------------


LIMIT_SEC = 90.0
REFUSED = "ConfigError: this process was forked from rank {}"


@pytest.mark.parametrize("first_use", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["later", "first use"])
def test_reduction_in_a_forked_process_is_config_error_and_the_rank_goes_on(first_use: bool) -> None:
    for rank, (refusals, later, kept) in enumerate(run_ranks(forked, 2, first_use, timeout_sec=LIMIT_SEC).values()):
        for text, status in refusals:
            assert text.startswith(REFUSED.format(rank)), refusals
            assert status == 0
        assert refusals[-1][0].endswith("Adds: 1")  # of the window, which keeps them
        assert later == [{"loss": 0.5}] * 3
        assert kept == {"loss": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("watches", [False, True], ids=["alone", "under a guard"])
def test_reduction_in_workers_of_a_loader_is_config_error_and_the_rank_goes_on(watches: bool) -> None:
    for rank, (before, refusals, later) in enumerate(run_ranks(in_workers, 2, watches, timeout_sec=LIMIT_SEC).values()):
        assert before == later == {"loss": 0.5}
        assert all(text.startswith(REFUSED.format(rank)) for text in refusals), refusals
