"""Programs for the ranks of `test_verdicts`."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import ddpstats
from ddpstats._ranks.store import wait_for
from ddpstats.guard import collective_guard, verdicts
from ddpstats.guard.failure_agreement import FailureAgreement
from ddpstats.guard.group import GuardMode

Raised = tuple[str, tuple[int, ...], str]
"""The name of an error, the ranks that it calls missing, and its text."""


def two_threads(steps: int) -> str:
    """Two threads use a group each; rank 0 alone has labels."""
    groups = [dist.new_group(), dist.new_group()]
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            for _ in range(steps):
                with ddpstats.label("loss") if dist.get_rank() == 0 else nullcontext():
                    dist.all_reduce(torch.ones(1), group=groups[number])
        except ddpstats.DdpstatsError as error:
            problems.append(f"{type(error).__name__}: {error}")

    try:
        with collective_guard("step", check_every=1, timeout_sec=20) as guard:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            guard.step()
    except ddpstats.DdpstatsError as error:
        problems.append(f"{type(error).__name__}: {error}")
    return "; ".join(problems)


def label_on_one_rank(steps: int, name: str) -> tuple[int, int]:
    """Return the verdicts that ranks came to, and the keys that the last ten steps added to the store.

    ``name``: the label, in which ``{}`` is the step.
    """
    store = dist.distributed_c10d._get_default_store()
    with collective_guard("step", timeout_sec=20) as guard:
        for step in range(steps):
            if step == steps - 10:
                wait_for(lambda: bool(_agreement_of(guard)._kept_position), 20.0)  # its watchdog writes that once
                dist.barrier()
                before = store.num_keys()
            with ddpstats.label(name.format(step)) if dist.get_rank() == 0 else nullcontext():
                dist.all_reduce(torch.ones(1))
            guard.step()
        dist.barrier()
        added = store.num_keys() - before
        dist.barrier()  # a rank that leaves writes keys, too
        return _agreement_of(guard).verdicts, added


def helper_with_names() -> str:
    """Return the verdict on ranks that name one call differently, behind one that rank 1 gave no name."""

    def reduce(name: str | None) -> None:
        with nullcontext() if name is None else ddpstats.label(name):
            dist.all_reduce(torch.ones(1))

    is_first = dist.get_rank() == 0
    try:
        with collective_guard("step", timeout_sec=20) as guard:
            reduce("total" if is_first else None)
            guard.step()
            reduce("l1" if is_first else "snr")
            guard.step()
    except ddpstats.CollectiveMismatch as error:
        return str(error)
    return "nothing"


def _agreement_of(guard: collective_guard) -> FailureAgreement:
    session = guard._watching.session
    assert session is not None
    assert session.agreement is not None
    return session.agreement


def _serve_by_rank_0() -> None:
    """Make a default group whose store is rank 0's own."""
    from torch._C._distributed_c10d import TCPStore

    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([0 if store is None else store.port])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    store = store or TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def killed_before_rank_0_ends(mode: GuardMode) -> Raised:
    """Rank 2 is killed. Rank 0 finds that and ends, and its store with it. Rank 1 comes later."""
    _serve_by_rank_0()
    rank = dist.get_rank()
    try:
        with collective_guard(mode, timeout_sec=30):
            dist.all_reduce(torch.ones(1))
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(6.0 if rank == 1 else 0.5)
            dist.all_reduce(torch.ones(1))
    except ddpstats.RankMissing as error:
        if rank == 0:
            os._exit(3)
        return type(error).__name__, error.missing_ranks, str(error)
    return "nothing", (), ""


def host_is_killed(mode: GuardMode) -> tuple[str, str]:
    """Rank 0 is killed, and its store with it. Return the error's text, and all that Python prints of it."""
    _serve_by_rank_0()
    try:
        with collective_guard(mode, timeout_sec=30):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(2))
    except ddpstats.RankMissing as error:
        return str(error), "".join(traceback.format_exception(error))
    return "nothing", ""


def aborted(mode: GuardMode, what: str, odd: int) -> Raised:
    """What gloo cannot take: it ends one of the two processes. Rank 0 serves the store; ``odd`` does something else."""
    _serve_by_rank_0()
    rank = dist.get_rank()
    try:
        with collective_guard(mode, timeout_sec=15):
            dist.all_reduce(torch.ones(1))
            if what == "splits":
                sizes = [3 if rank == odd != other else 2 for other in range(2)]
                dist.all_to_all_single(torch.empty(4), torch.ones(sum(sizes)), [2, 2], sizes)
            elif what == "refused":
                dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3] if rank == odd else [2, 2], [2, 2])
            else:
                _train(stray=rank == odd)
    except ddpstats.DdpstatsError as error:
        return type(error).__name__, getattr(error, "missing_ranks", ()), str(error)
    except RuntimeError as error:
        return type(error).__name__, (), str(error)
    return "nothing", (), ""


def _train(stray: bool) -> None:
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        if stray:
            dist.all_reduce(torch.ones(3))


def one_step_less(is_meant: bool, patience_sec: float) -> tuple[Raised, float]:
    """Rank 1 leaves without the last collective of rank 0, and how long that takes.

    Rank 0 then waits where the guard sees nothing, as in DDP, until rank 1 has left; or, where that ``is_meant``, for
    the collective, with a timeout that it catches.
    """
    store = dist.distributed_c10d._get_default_store()
    started = time.monotonic()
    raised: Raised = "nothing", (), ""
    try:
        with mock.patch.object(verdicts, "_PASSED_SEC", patience_sec), collective_guard("step"):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                work: Any = dist.all_reduce(torch.ones(1), async_op=True)
                if is_meant:
                    with suppress(RuntimeError):
                        work.wait(timedelta(seconds=1))
                else:
                    store.wait(["has left"], timedelta(seconds=30))
    except ddpstats.DdpstatsError as error:
        raised = type(error).__name__, getattr(error, "missing_ranks", ()), str(error)
    took_sec = time.monotonic() - started
    store.set("has left", "")
    return raised, took_sec
