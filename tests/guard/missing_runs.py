"""Programs for the ranks of `test_missing`: rank 2 is interrupted in a reduction, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats._base import config
from ddpstats._ranks.comm import GlooComm
from ddpstats._ranks.failure import Membership
from ddpstats._ranks.store import bounded
from ddpstats.guard.failure_agreement import FailureAgreement
from ddpstats.guard.group import GuardMode

AFTERWARDS_SEC = 2.0


def interrupted(rank_1: str, rank_2: str) -> tuple[str, tuple[int, ...]]:
    """Whom this rank is told to miss last, and how. Rank 0 issues one more collective under the guard.

    Rank 1 "comes later" to that, or "leaves" the guard by what the reduction told it. Rank 2 "leaves" the guard by its
    interrupt, or "stays" in it.
    """
    rank = dist.get_rank()
    try:
        with ddpstats.collective_guard("step", timeout_sec=30):
            dist.all_reduce(torch.ones(1))
            ddpstats.reduce_stats({"loss": 1.0})
            try:
                _reduce(interrupted=rank == 2)
            except (ddpstats.RankMissing, KeyboardInterrupt):
                if (rank, "leaves") in ((1, rank_1), (2, rank_2)):
                    raise
            if rank == 2 or (rank == 0) == (rank_1 == "leaves"):
                time.sleep(AFTERWARDS_SEC * (1 + rank))
            if rank != 2:
                dist.all_reduce(torch.ones(1))
    except ddpstats.RankMissing as error:
        return str(error), error.missing_ranks
    except KeyboardInterrupt:
        pass
    return "nothing", ()


def _reduce(interrupted: bool) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with mock.patch.object(GlooComm, "all_reduce", interrupt if interrupted else GlooComm.all_reduce):
        ddpstats.reduce_stats({"loss": 1.0})


def stopped(seconds: float, in_look: bool) -> tuple[float, float]:
    """How long this process knows that it did not run, before and after it did not; ``in_look``: of the watchdog's."""
    is_over = threading.Event()

    def stop() -> str:
        with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        is_over.set()
        return ""

    members = Membership(bounded(HashStore()), 0, range(2))
    own: Any = SimpleNamespace(position=lambda: stop() if in_look and not is_over.is_set() else "")
    agreement = FailureAgreement(members, own, lambda name, rank: [], lambda: True)
    before_sec = agreement.slept_sec()
    if not in_look:
        stop()
    is_over.wait()
    after_sec = agreement.slept_sec()
    agreement.close()
    return before_sec, after_sec


def slow(mode: GuardMode, timeout_sec: float | None) -> str:
    """What is raised where rank 0 comes late to a group that waits for a minute, and others for 2 s.

    It comes 4 s late, or with a timeout once rank 1 has given up.
    """
    with mock.patch.object(config, "DEFAULT_TIMEOUT_SEC", 2.0):
        guard = ddpstats.collective_guard(mode, timeout_sec=timeout_sec)
    group, store = dist.new_group(timeout=timedelta(minutes=1)), dist.distributed_c10d._get_default_store()
    try:
        with guard:
            for asynchronous in (False, True):
                if dist.get_rank() == 0 and timeout_sec is None:
                    time.sleep(4.0)
                elif dist.get_rank() == 0:
                    store.wait(["given up"])
                work = dist.all_reduce(torch.ones(1), group=group, async_op=asynchronous)
                if work is not None:
                    work.wait()
    except ddpstats.RankMissing as error:
        store.set("given up", "")
        return str(error)
    return "nothing"
