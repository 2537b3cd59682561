"""Ranks that raise in a micro-batch, and ranks that wait, compute or reduce meanwhile: for `test_peers`.

Each function makes a group of its own: what a rank announces closes the group's reductions.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats import NaNCapture, RankMissing
from tests.training import batch_of, loss_of, make_model, rank

POLL_SEC, LONG_SEC, GRACE_SEC = 0.2, 0.3, 1.0
LONGER_THAN_ANY_GRACE_SEC = 3.0


@contextlib.contextmanager
def impatient() -> Iterator[Any]:
    """Yield a group whose captures look after waiting ranks many times sooner than they do by default."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("POLL_SEC", POLL_SEC), ("LONG_SEC", LONG_SEC), ("GRACE_SEC", GRACE_SEC)):
            patch.setattr(f"ddpstats.capture._peers.{name}", value)
        yield dist.new_group([0, 1])


def _refusal(capture: NaNCapture) -> str:
    """Return what the next micro-batch raises, within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with capture.micro_batch(0):
                pass
        except RankMissing as error:
            return str(error)
    return "nothing"


def all_raise_and_go_on(dirpath: str) -> list[str]:
    """Both ranks raise and catch it; return what their next two micro-batches raise."""
    group = dist.new_group([0, 1])
    with NaNCapture(dirpath, model=make_model(), group=group) as capture:
        with contextlib.suppress(ValueError), capture.micro_batch(batch_of(0)):
            dist.barrier()  # No rank announces before all have begun.
            raise ValueError(f"of rank {rank()}")
        dist.barrier()
        return [_refusal(capture), _refusal(capture)]


def reducer_times_out(dirpath: str) -> tuple[str, str]:
    """A reducer times out, and then a step takes long; return what the reducer and `check` raise."""
    with impatient() as group:
        module = DistributedDataParallel(make_model(), process_group=group)
        lost = ""
        with NaNCapture(dirpath, model=module, group=group) as capture:
            with capture.micro_batch(batch_of(0)) as micro:
                loss_of(module, micro.batch).backward()  # type: ignore[no-untyped-call]
            capture.check()
            if rank() == 0:
                with pytest.raises(RankMissing) as caught:
                    ddpstats.StatsReducer(name="validation", timeout_sec=1, group=group)({"a": 1.0})
                lost = str(caught.value)
            dist.barrier()
            with capture.micro_batch(batch_of(1)) as micro:
                time.sleep(LONGER_THAN_ANY_GRACE_SEC)
                loss_of(module, micro.batch).backward()  # type: ignore[no-untyped-call]
            with pytest.raises(RankMissing) as caught:
                capture.check()
    return lost, str(caught.value)


def learns_before_it_begins(dirpath: str) -> str:
    """Rank 1 raises while rank 0 is between two micro-batches."""
    group = dist.new_group([0, 1])
    with NaNCapture(dirpath, model=make_model(), group=group) as capture:
        with contextlib.suppress(ValueError), capture.micro_batch(0):
            dist.barrier()  # A rank that comes later would be refused here.
            if rank() == 1:
                raise ValueError("label 17 of 3")
        dist.barrier()
        return _refusal(capture)


def computes_while_another_raised(dirpath: str) -> int:
    """Rank 0's micro-batch takes long, and it computes all the time."""
    count = 0
    with impatient() as group, NaNCapture(dirpath, model=make_model(), group=group) as capture:
        with contextlib.suppress(ValueError), capture.micro_batch(0):
            dist.barrier()  # A rank that comes later would be refused here.
            if rank() == 1:
                raise ValueError("label 17 of 3")
            done: list[bool] = []
            threading.Timer(LONGER_THAN_ANY_GRACE_SEC, done.append, [True]).start()
            while not done:  # seen from another thread, it is always at the same instruction
                count += 1
        dist.barrier()
    return count
