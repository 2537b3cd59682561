"""What runs on the ranks of the tests of peers and of attribution."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats import NaNCapture, RankMissing

NAN = float("nan")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def all_raise_and_go_on(dirpath: str) -> list[str]:
    """Both ranks raise, both catch it; then a micro-batch that takes longer than any grace."""
    module = DistributedDataParallel(make_model())
    said = []
    with NaNCapture(dirpath, model=module) as capture:
        try:
            with capture.micro_batch(torch.ones(2, 4)):
                dist.barrier()  # Nobody has announced before everybody has begun.
                raise ValueError(f"of rank {dist.get_rank()}")
        except ValueError:
            pass
        dist.barrier()
        for _ in range(2):
            try:
                with capture.micro_batch(torch.ones(2, 4)):
                    pass
            except RankMissing as error:
                said.append(str(error))
        # This rank has announced: whoever waits for it, its own watcher does not end it.
        capture._peers._ended = None
        capture._peers._looked = time.monotonic() + 60
        with capture.micro_batch(torch.ones(2, 4)):
            time.sleep(8)
    return said


def stats_broke(dirpath: str) -> tuple[str, str]:
    """A reducer that times out has nothing to do with a long step."""
    module = DistributedDataParallel(make_model())
    x = torch.ones(2, 4)
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(x):
            module(x).sum().backward()
        capture.check()
        if dist.get_rank() == 0:
            try:
                ddpstats.StatsReducer(name="validation", timeout_sec=1)({"a": 1.0})
            except RankMissing as error:
                lost = str(error)
        else:
            time.sleep(2)
            lost = ""
        with capture.micro_batch(x):
            time.sleep(8)
            module(x).sum().backward()
        try:
            capture.check()
        except RankMissing as error:
            return lost, str(error)
    return lost, "nothing"


def learns_before_it_begins(dirpath: str) -> str:
    """Rank 1 raises while rank 0 is between two micro-batches."""
    with NaNCapture(dirpath, model=make_model()) as capture:
        try:
            with capture.micro_batch(0):
                dist.barrier()  # a rank that comes later would be refused here
                if dist.get_rank() == 1:
                    raise ValueError("label 17 of 3")
        except ValueError:
            pass
        dist.barrier()
        time.sleep(1.1)
        try:
            capture._peers.refuse_if_ended()
        except RankMissing as error:
            return str(error)
    return "nothing"


def busy_while_another_raised(dirpath: str) -> int:
    """Rank 0's micro-batch takes long, and it computes all the time: nobody has to end it."""
    count = 0
    capture = NaNCapture(dirpath, model=make_model())
    try:
        with capture.micro_batch(0):
            dist.barrier()  # a rank that comes later would be refused here
            if dist.get_rank() == 1:
                raise ValueError("label 17 of 3")
            done: list[bool] = []
            threading.Timer(8, done.append, [True]).start()
            while not done:  # seen from another thread, it is always at the same instruction
                count += 1
    except ValueError:
        pass
    capture.close()
    return count


# -- causes -----------------------------------------------------------------------------------------------------------


def table_step(model: nn.Module, batch: Any) -> Tensor:
    """A table that only rank 1 holds wrongly, and no parameter or buffer."""
    weights = torch.tensor([1.0 if dist.get_rank() == 0 else NAN])
    loss: Tensor = (model(batch) * weights).sum()
    return loss


def plain_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).sum()
    return loss


def another_loss_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def auxiliary(module: nn.Module, batch: Any) -> Tensor:
    """As trained: the plain loss, and a part of it that is bad on rank 1."""
    first: Tensor = next(module.parameters())
    return plain_step(module, batch) + (first.sum() * NAN if dist.get_rank() == 1 else 0)


def auxiliary_gradient(module: nn.Module, batch: Any) -> Tensor:
    """The loss is finite, and its gradient is not."""
    first: Tensor = next(module.parameters())
    return plain_step(module, batch) + (first.sum() * 0 if dist.get_rank() == 0 else (first * 0).sum().sqrt())


def scaled(module: nn.Module, batch: Any) -> Tensor:
    """The plain loss times three, and another bad part."""
    return 3 * plain_step(module, batch) + auxiliary(module, batch)


def attributed(dirpath: str, trained: str, step_name: str, keeps_loss: bool = True) -> str | None:
    train: Callable[[nn.Module, Any], Tensor] = globals()[trained]
    step_fn: Callable[[nn.Module, Any], Tensor] = globals()[step_name]
    module = DistributedDataParallel(make_model())
    with NaNCapture(dirpath, model=module, attribute=True, step_fn=step_fn) as capture:
        with capture.micro_batch(torch.ones(2, 4)) as kept:
            loss = train(module, kept.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if keeps_loss:
                kept.loss = loss
        return capture.check().attribution


def dying_step(model: nn.Module, batch: Any) -> Tensor:
    """Trained as it should be; a rerun ends the process."""
    if isinstance(model, DistributedDataParallel):
        loss: Tensor = model(batch).sum() * (torch.nan if dist.get_rank() == 1 else 1.0)
        return loss
    os._exit(9)


def attributed_slowly(dirpath: str) -> str | None:
    """One run takes longer than what the ranks would wait for two more."""
    module = DistributedDataParallel(make_model())

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.0 if model is module else 1.2)
        return plain_step(model, batch) * NAN

    with (
        mock.patch("ddpstats.capture._attribution.patience_sec", return_value=3.0),
        NaNCapture(dirpath, model=module, attribute=True, step_fn=step_fn) as capture,
    ):
        with capture.micro_batch(torch.ones(2, 4)) as kept:
            step_fn(module, kept.batch).backward()  # type: ignore[no-untyped-call]
        return capture.check().attribution
