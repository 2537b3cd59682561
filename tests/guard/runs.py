"""Programs for the ranks of `test_guard`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ddpstats
from ddpstats._observe import collectives
from ddpstats.guard import collective_guard, notes_shm
from tests.guard.scenarios import Ending, probe
from tests.training import logged


def guarded(mode: Any, program: Any, *args: Any) -> str:
    """Run a program under a guard; return the class and text of the error that it ends with, or "silent"."""
    try:
        with collective_guard(mode, timeout_sec=20.0) as guard:
            program(*args)
            guard.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "silent"


def without_shared_memory() -> AbstractContextManager[Any]:
    """Inside, the ranks share no memory, as between hosts."""
    return mock.patch.object(notes_shm._SharedMemory, "of", side_effect=OSError("no shared memory here"))


def serve_by_rank_0() -> None:
    """Make another default group, whose store is rank 0's own."""
    from torch._C._distributed_c10d import TCPStore

    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([0 if store is None else store.port])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    store = store or TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def over_the_store(name: str, mode: str, bad: bool) -> Ending:
    with without_shared_memory():
        return probe(name, mode, bad)


def passes_what_others_wait_in(then: str) -> tuple[str, str, bool]:
    """Without shared memory, gloo lets rank 1 pass with a smaller tensor, and the others wait for ever."""
    began, size = time.monotonic(), 4 if dist.get_rank() == 1 else 5
    with without_shared_memory():
        try:
            with collective_guard("step", timeout_sec=30) as guard:
                dist.all_reduce(torch.ones(1))
                dist.all_reduce(torch.ones(size))
                guard.step() if then == "step" else dist.all_reduce(torch.ones(1))
        except ddpstats.DdpstatsError as error:
            return type(error).__name__, str(error), time.monotonic() < began + 15
    return "silent", "", False


def warned() -> tuple[list[str], int]:
    """on_mismatch="warn": one warning, and the program goes on."""
    with logged() as messages, collective_guard("strict", on_mismatch="warn", timeout_sec=10) as guard:
        for step in range(3):
            op = dist.ReduceOp.MAX if dist.get_rank() == 1 and step == 1 else dist.ReduceOp.SUM
            dist.all_reduce(torch.ones(1), op=op)
    return messages, guard.counters.collectives


def warned_and_then_alone(mode: Any) -> tuple[list[str], str]:
    """Go on after a warning, until rank 1 dies of another cause. Return the warnings, and the error of rank 0."""
    rank, error = dist.get_rank(), "nothing"
    with logged() as messages:
        try:
            with collective_guard(mode, on_mismatch="warn", timeout_sec=10) as guard:
                dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
                guard.step()
                if rank:
                    os._exit(3)
                dist.all_reduce(torch.ones(1))
        except RuntimeError as raised:
            error = type(raised).__name__
    return messages, error


def message_from_before_the_guard(mode: Any) -> str:
    """Rank 0 sends a message before it has a guard, which rank 1 receives under one. No rank does anything wrong."""
    first, second, rank = torch.ones(2), torch.ones(4), dist.get_rank()
    work = None if rank else dist.isend(first, 1)
    try:
        with collective_guard(mode, timeout_sec=10):
            dist.all_reduce(torch.ones(1))
            for tensor in (first, second) if rank else (second,):
                dist.recv(tensor, 0) if rank else dist.send(tensor, 1)
            if work is not None:
                work.wait()
    except ddpstats.DdpstatsError as error:
        return str(error)
    return "silent"


def values_after_a_mismatch() -> dict[str, tuple[str, list[float]]]:
    """Return the errors of mode "strict", and what this rank's tensors then hold, which began as its number."""
    rank = dist.get_rank()

    def reduce_by_key(tensor: torch.Tensor) -> None:
        stats = {"loss": torch.ones(()), ("l1" if rank else "snr"): tensor}
        for key in stats:
            dist.all_reduce(stats[key])

    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "key": reduce_by_key,
        "reduce op": lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "root": lambda tensor: dist.broadcast(tensor, src=rank),
    }
    ends = {}
    for what, call in calls.items():
        tensor, error = torch.full((2,), float(rank)), "nothing"
        try:
            with collective_guard("strict", timeout_sec=10):
                call(tensor)
        except ddpstats.CollectiveMismatch as raised:
            error = type(raised).__name__
        ends[what] = error, tensor.tolist()
    return ends


def waits_alone(mode: Any, on_mismatch: Any) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 stays away from the second collective until rank 0 has given up. Return rank 0's error and its wait."""
    store = dist.distributed_c10d._get_default_store()
    with collective_guard(mode, on_mismatch=on_mismatch) as guard:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            store.wait(["given up"])
            guard.abandon()
            return "", (), 0.0
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1))
        except ddpstats.RankMissing as error:
            return type(error).__name__, error.missing_ranks, time.monotonic() - started
        finally:
            store.set("given up", "")
    return "nothing", (), 0.0


def unmet(mode: Any, how: str) -> str:
    """A message that only rank 0 is about; or both ranks send before they receive."""
    at_its_end = dist.get_rank() == 1 and how != "both send"  # and waits there for rank 0, longer than that one does
    try:
        with collective_guard(mode, timeout_sec=20 if at_its_end else 3):
            dist.all_reduce(torch.ones(1))
            if how == "both send":
                dist.send(torch.ones(3), 1 - dist.get_rank(), tag=7)
            elif dist.get_rank() == 1:
                time.sleep(6 if how == "send, slow" else 0)
            elif how == "recv":
                dist.recv(torch.ones(3), 1, tag=7)
            elif how == "isend":
                work: Any = dist.isend(torch.ones(3), 1, tag=7)
                work.wait()
            else:
                dist.send(torch.ones(3), 1, tag=7)
    except ddpstats.RankMissing as error:
        chained = error.__context__ or error.__cause__
        return f"{error.missing_ranks} {error}" if chained is None else f"chained: {chained!r}"
    return "silent"


def abandoned() -> str:
    """A mismatch that a last comparison would find."""
    guard = collective_guard("step")
    guard.__enter__()
    with ddpstats.label(f"rank {dist.get_rank()}"):  # names are compared at a step, and not before
        dist.all_reduce(torch.ones(1))
    guard.abandon()
    return "left installed" if collectives._subscribers else "fine"


def off() -> bool:
    """mode="off" touches nothing."""
    before = dist.Work.wait
    with collective_guard("off"):
        dist.all_reduce(torch.ones(1))
        return bool(collectives._subscribers) or dist.Work.wait is not before


def many(count: int) -> tuple[int, int]:
    """Return how large the guard's memory gets: events kept, and bytes, which rank 0 counts."""
    import tracemalloc

    with collective_guard("step", check_every=64) as guard:
        dist.all_reduce(torch.ones(1))
        # Tracing goes on until the rank ends: `tracemalloc.stop` beside a gloo thread crashes CPython (gh-128679).
        if dist.get_rank() == 0:
            tracemalloc.start()
        for number in range(count):
            with ddpstats.label(f"step {number}"):
                dist.all_reduce(torch.ones(1))
        used = tracemalloc.get_traced_memory()[0]
        return len(guard._watching.ring._entries), used


def two_lives() -> None:
    """The program makes itself another process group inside one guard."""
    serve_by_rank_0()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def foreign_bytes(key: str, value: str) -> str:
    """Another program writes into the guard's part of the store."""
    try:
        with collective_guard("strict", timeout_sec=3) as guard:
            dist.all_reduce(torch.ones(1))
            assert guard._watching.session is not None
            if dist.get_rank() == 0:
                guard._watching.session._store.set(key, value)
            dist.barrier()
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
    except ddpstats.DdpstatsError as error:
        return type(error).__name__
    return "silent"


def guarded_twice(directory: str) -> str:
    """Record two guards of one program, one after the other, with a fault under the first."""
    for number in range(2):
        with collective_guard("record", record_dir=directory):
            odd = number == 0 and dist.get_rank() == 1
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    return "recorded"


def doubted(mode: str, utterances: int) -> tuple[list[str], int]:
    """Each rank reduces under its own names, over and over, and uses the results without them."""
    names = ("anna", "ben", "carl") if dist.get_rank() == 0 else ("dora", "emil", "fritz")
    losses = {name: torch.ones(1) for name in names}
    with logged() as messages, collective_guard(mode, timeout_sec=10) as guard:  # type: ignore[arg-type]
        for _ in range(utterances):
            kept = []
            for _, loss in losses.items():
                loss = loss.clone()
                dist.all_reduce(loss)
                kept.append(loss)
            guard.step()
        session = guard._watching.session
        verdicts = 0 if session is None or session.agreement is None else session.agreement.verdicts
    return messages, verdicts


def fault_after_a_doubt(mode: str) -> str:
    """Warn of one call site, and end by a fault at another one."""
    own_name = "anna" if dist.get_rank() == 0 else "dora"
    try:
        with collective_guard(mode, timeout_sec=10) as guard:  # type: ignore[arg-type]
            for _ in range(3):
                for loss in {own_name: torch.ones(1)}.values():
                    loss = loss.clone()
                    dist.all_reduce(loss)
                guard.step()
            stats = {"ctc": torch.ones(1), "att": torch.ones(1)}
            for key in reversed(stats) if dist.get_rank() else stats:
                dist.all_reduce(stats[key])
            guard.step()
    except ddpstats.CollectiveMismatch as error:
        return str(error)
    return "silent"


def recorded_under_own_names(directory: str) -> None:
    losses = {"anna" if dist.get_rank() == 0 else "dora": torch.ones(1)}
    with collective_guard("record", record_dir=directory):
        for loss in losses.values():
            kept = loss.clone()
            dist.all_reduce(kept)
