"""Programs for the ranks of `test_diagnosis`: each returns how it ended under a guard."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ddpstats
from ddpstats._ranks.store import BoundedStore
from ddpstats.guard import collective_guard
from ddpstats.guard.labels import read, trace


def guarded(mode: Any, program: Any, *args: Any, limit_sec: float = 20.0) -> str:
    """Return the error's class and text, or "silent"."""
    try:
        with collective_guard(mode, timeout_sec=limit_sec) as guard:
            program(*args)
            guard.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "silent"


def pipelined(mode: str) -> str:
    """Two stages of torch's own pipelining, which warm up by sending a 0-d tensor into a 1-d one."""
    return guarded(mode, _two_stages)


def _two_stages() -> None:
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = pipeline(model, mb_args=(torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    schedule.step(*([torch.ones(4, 4)] if rank == 0 else []))


def equal_elements(mode: str) -> str:
    """Ranks pass as many elements of one dtype in other shapes, to all kinds of collectives."""
    return guarded(mode, _equal_elements)


def _equal_elements() -> None:
    rank = dist.get_rank()

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count) if rank == 0 else torch.ones(1, count)

    dist.all_reduce(torch.ones([]) if rank == 0 else torch.ones(1))
    dist.all_reduce(ones(4))
    dist.broadcast(ones(4), src=0)
    dist.all_gather([ones(4), ones(4)], ones(4))
    whole = torch.ones(8) if rank == 0 else torch.ones(2, 4)
    dist.all_gather_into_tensor(whole, ones(4))
    dist.reduce_scatter_tensor(ones(4), whole)
    dist.gather(ones(2), [torch.ones(2), torch.ones(2)] if rank == 0 else None, dst=0)
    dist.scatter(ones(2), [torch.ones(2), torch.ones(2)] if rank == 0 else None, src=0)
    sent = torch.ones(4, 2) if rank == 0 else torch.ones(4, 1, 2)
    dist.all_to_all_single(
        torch.empty_like(sent), sent, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1]
    )
    if rank == 0:
        dist.send(torch.ones([]), 1)
    else:
        dist.recv(torch.zeros(1), 0)


def many_sends(mode: str, count: int) -> str:
    """A sender that waits for none of its messages until all are under way."""
    return guarded(mode, _many_sends, count)


def _many_sends(count: int) -> None:
    if dist.get_rank() == 0:
        works: list[Any] = [dist.isend(torch.ones(1), 1) for _ in range(count)]
        dist.barrier()
        for work in works:
            work.wait()
    else:
        dist.barrier()
        for _ in range(count):
            dist.recv(torch.empty(1), 0)


def questions_of_messages(mode: Any, count: int) -> int:
    """Return how often this thread asks the store while it exchanges so many messages."""
    asked = []

    def exchange() -> None:
        for _ in range(count):
            if dist.get_rank() == 0:
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.empty(1), 0)

    def use(store: BoundedStore, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.append(args)
        return original(store, *args, **kwargs)

    original = BoundedStore.use
    with collective_guard(mode, timeout_sec=20):
        dist.barrier()
        exchange()
        with mock.patch.object(BoundedStore, "use", use):
            exchange()
    return len(asked)


def message_of_limited_group(mode: Any, is_sent: bool) -> tuple[str, str]:
    """Rank 1 receives into another dtype, or in vain, in a group whose own timeout is two seconds."""
    group, store = dist.new_group(timeout=timedelta(seconds=2)), dist.distributed_c10d._get_default_store()
    try:
        with collective_guard(mode):
            if dist.get_rank() == 1:
                dist.recv(torch.empty(4, dtype=torch.int32), 0, group=group)
            elif is_sent:
                dist.send(torch.ones(4), 1, group=group)
            else:
                store.wait(["received"], timedelta(seconds=30))
    except Exception as error:
        store.set("received", "")
        return type(error).__name__, f"{error} {getattr(error, '__notes__', '')}"
    return "silent", ""


def skipped(mode: str) -> str:
    """Rank 1 skips a step of a loop, in which each call is another one."""
    return guarded(mode, _skipped)


def _skipped() -> None:
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(5))
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX)
    dist.barrier()


def labelled_on_one_rank(mode: Any, steps: int) -> int:
    """Return how often all objects of the process were looked at, while ranks train with DDP and one of them labels."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with mock.patch.object(gc, "get_objects", side_effect=gc.get_objects) as objects, collective_guard(mode) as guard:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            if dist.get_rank() == 0:
                with ddpstats.label("loss"):
                    dist.all_reduce(torch.ones(1))
            else:
                dist.all_reduce(torch.ones(1))
            guard.step()
    return objects.call_count


def evidence_worked_out(mode: Any, directory: str) -> int:
    """Return how often evidence for a label is worked out, where ranks reduce the same two keys ten times."""
    stats = {"loss": torch.ones(1), "acc": torch.ones(1)}
    with mock.patch.object(read, "use_of", side_effect=trace.use_of) as work_out:
        with collective_guard(mode, record_dir=directory if mode == "record" else None) as guard:
            for _ in range(10):
                for key in stats:
                    dist.all_reduce(stats[key])
                guard.step()
        return work_out.call_count


def issued_by_torch(mode: str) -> str:
    """Rank 1 calls a collective of its own, where the other's DDP sends its buffers."""
    return guarded(mode, _issued_by_torch, limit_sec=4.0)


def _issued_by_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    replica = torch.nn.parallel.DistributedDataParallel(model)
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(3, dtype=torch.int64), src=0)
    replica(torch.ones(4, 2))


def swapped_lines(mode: Any) -> int:
    """Return how many warnings this rank logs of two pairs of lines that ranks run in another order."""
    with mock.patch("ddpstats.guard.pipeline.log.warning") as warning, collective_guard(mode, timeout_sec=20):
        for _ in range(3):
            metrics = {name: torch.ones(1) for name in ("loss", "accuracy", "first", "second")}
            if dist.get_rank() == 0:
                _reduce_loss(metrics)
                _reduce_accuracy(metrics)
            else:
                _reduce_accuracy(metrics)
                _reduce_loss(metrics)
            if dist.get_rank() == 0:
                dist.all_reduce(metrics["first"]), dist.all_reduce(metrics["second"])
            else:
                dist.all_reduce(metrics["second"]), dist.all_reduce(metrics["first"])
    return warning.call_count


def _reduce_loss(metrics: dict[str, torch.Tensor]) -> None:
    dist.all_reduce(metrics["loss"])


def _reduce_accuracy(metrics: dict[str, torch.Tensor]) -> None:
    dist.all_reduce(metrics["accuracy"])
