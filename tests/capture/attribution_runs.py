"""Steps that go wrong for different causes, under ``attribute=True``: what `test_attribution` runs on the ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture
from ddpstats.capture import CaptureVerdict
from tests.training import batch_of, draw, rank, seed, tensor_of_kind

NAN = float("nan")
_calls: list[str] = []


class Unique(nn.Linear):
    """A layer of which there is no room for a copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError("no room for a copy")


def make_model(kind: str = "") -> nn.Module:
    torch.manual_seed(1)
    if kind == "large":
        return nn.Sequential(Unique(6, 3))
    if kind == "one layer":
        return nn.Sequential(nn.Linear(6, 3))
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Dropout(0.2), nn.Linear(8, 3))


def plain(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss


def transient(model: nn.Module, batch: Any) -> Tensor:
    """Go wrong in the first call on rank 1 only."""
    _calls.append("transient")
    return plain(model, batch) * (NAN if len(_calls) == 1 and rank() == 1 else 1.0)


def broken_device(model: nn.Module, batch: Any) -> Tensor:
    """Go wrong wherever rank 1 runs it."""
    return plain(model, batch) * (NAN if rank() == 1 else 1.0)


def without_room(model: nn.Module, batch: Any) -> Tensor:
    return broken_device(model, batch)


def dividing(model: nn.Module, batch: Any) -> Tensor:
    """Divide by a count that may be zero."""
    out: Tensor = model(batch["x"]).square()
    loss: Tensor = out.sum() / (batch["x"] > 0).sum()
    return loss


def in_float16(model: nn.Module, batch: Any) -> Tensor:
    """Go wrong in products beyond 65504, which are infinite in float16."""
    with torch.autocast("cpu", dtype=torch.float16):
        out: Tensor = model(batch["x"])
    return out.float().mean()


def communicating(model: nn.Module, batch: Any) -> Tensor:
    total = batch["x"].sum()
    dist.all_reduce(total)
    loss: Tensor = plain(model, batch) + 0 * total
    return loss


def another_loss(model: nn.Module, batch: Any) -> Tensor:
    return 2 * plain(model, batch)


def with_bad_gradient(module: nn.Module, batch: Any) -> Tensor:
    """Add a part whose value is finite, and whose gradient is not on rank 1."""
    first: Tensor = next(module.parameters())
    return plain(module, batch) + (first.sum() * 0 if rank() == 0 else (first * 0).sum().sqrt())


def tripled_with_bad_part(module: nn.Module, batch: Any) -> Tensor:
    first: Tensor = next(module.parameters())
    return 3 * plain(module, batch) + (first.sum() * NAN if rank() == 1 else 0)


def dying(model: nn.Module, batch: Any) -> Tensor:
    """Run as trained; end rank 1's process when rerun."""
    if isinstance(model, DistributedDataParallel) or rank() == 0:
        return broken_device(model, batch)
    os._exit(9)


def slow(model: nn.Module, batch: Any) -> Tensor:
    """Run as trained; take a while when rerun."""
    if not isinstance(model, DistributedDataParallel):
        time.sleep(2)
    return broken_device(model, batch)


def with_short_timeout(dirpath: str, step_fn: str) -> CaptureVerdict:
    """Let two reruns take longer than the timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPSTATS_TIMEOUT_SEC", "3")
        return attributed(dirpath, step_fn, step_fn)[0]


def keeping(dirpath: str, batch: Any, buffer: Any, x: float, has_foreign: bool = False) -> CaptureVerdict:
    """Return the verdict on one step, whose batch and module hold such tensors; rank 1's batch is filled with ``x``.

    ``batch``, ``buffer``: a dtype, or None for none, or "foreign"; ``has_foreign``: a frozen parameter is `Foreign`.
    """
    model = make_model("one layer")
    if buffer is not None:
        model.register_buffer("kept", tensor_of_kind(buffer))
    if has_foreign:
        model.register_parameter("frozen", nn.Parameter(tensor_of_kind("foreign"), requires_grad=False))
    with NaNCapture(dirpath, model=model, attribute=True, step_fn=dividing) as capture:
        kept_batch = {**batch_of(0), **({} if batch is None else {"kept": tensor_of_kind(batch)})}
        kept_batch["x"].fill_(x if rank() == 1 else 1.0)
        with capture.micro_batch(kept_batch):
            dividing(model, kept_batch).backward()  # type: ignore[no-untyped-call]
        return capture.check()


def _same(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.allclose(tensor, twin, 0, 0, equal_nan=True) for tensor, twin in zip(tensors, others, strict=True))


def attributed(
    dirpath: str,
    trained: str,
    step_fn: str,
    batch_value: float | None = None,
    keeps_loss: bool = True,
    device: str = "cpu",
) -> tuple[CaptureVerdict, bool]:
    """Return the verdict on one step, and whether the reruns left the training as it was.

    ``batch_value`` is what rank 1's batch is filled with; ``keeps_loss``: the capture learns the loss.
    """
    _calls.clear()
    model = make_model({"in_float16": "one layer", "without_room": "large"}.get(trained, "")).to(device)
    module = DistributedDataParallel(model)
    with NaNCapture(dirpath, model=module, attribute=True, step_fn=globals()[step_fn]) as capture:
        batch = {name: tensor.to(device) for name, tensor in batch_of(0).items()}
        if rank() == 1 and batch_value is not None:
            batch["x"].fill_(batch_value)
        with capture.micro_batch(batch) as micro:
            loss = globals()[trained](module, batch)
            loss.backward()
            if keeps_loss:
                micro.loss = loss
        seed(7)
        before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        gradients = [parameter.grad for parameter in model.parameters()]
        verdict = capture.check()
        drawn = draw()
    seed(7)
    is_untouched = (
        drawn == draw()
        and _same(before, (*model.parameters(), *model.buffers()))
        and all(old is new.grad for old, new in zip(gradients, model.parameters(), strict=True))
    )
    return verdict, is_untouched
