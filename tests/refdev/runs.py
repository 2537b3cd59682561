"""Functions that run on the ranks of this folder's tests. A rank registers the device by `join` or `register`."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LIMIT_SEC = 60.0
"""How long the device is kept busy at most: a test that waits for it takes as long, and fails."""


def register() -> Any:
    """Return the module that registers the device."""
    import tests.refdev.device as refdev

    return refdev


def join(timeout_sec: float = 60.0) -> Any:
    """Make this rank's default process group one with refccl for the device, and gloo for the CPU. Once a process."""
    refdev = register()
    if "refccl" not in str(dist.get_backend_config()):
        rank, size = dist.get_rank(), dist.get_world_size()
        store = PrefixStore("refccl", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        timeout = timedelta(seconds=timeout_sec)
        dist.init_process_group("cpu:gloo,refdev:refccl", store=store, rank=rank, world_size=size, timeout=timeout)
    return refdev


@contextlib.contextmanager
def busy(refdev: Any) -> Iterator[None]:
    """Keep the current stream busy as long as the body takes, and raise if the body waited for it."""
    start = time.monotonic()
    refdev.occupy(LIMIT_SEC)
    try:
        yield
    finally:
        refdev.release()
    assert time.monotonic() - start < LIMIT_SEC, "the host waited for the device"


@contextlib.contextmanager
def counted(refdev: Any) -> Iterator[dict[str, int]]:
    """Fill a dict with what the driver counted in the body; what it did not count is left out."""
    changes: dict[str, int] = {}
    before = refdev.counters()
    yield changes
    after = refdev.counters()
    changes.update({name: after[name] - before[name] for name in after if after[name] != before[name]})


# -- the device itself ------------------------------------------------------------------------------------------------


def launches() -> list[float]:
    """Kernels, copies and messages of a busy device return at once; the values are right afterwards."""
    refdev = register()
    x = torch.arange(6.0, device="refdev")
    pinned = torch.ones(6, pin_memory=True)
    target = torch.empty(6, pin_memory=True)
    with busy(refdev):
        y = (x * 2 + 1).reshape(2, 3).softmax(0).sum(1)
        x.add_(pinned.to("refdev", non_blocking=True))
        target.copy_(x, non_blocking=True)
        del y
    torch.accelerator.synchronize()
    return target.tolist()


def waits() -> list[float]:
    """Return how many seconds each thing waits that has to wait for a busy device."""
    refdev = register()
    x = torch.ones(4, device="refdev")
    seconds = []
    for read in (x.sum().item, x.cpu, x.nonzero, lambda: torch.zeros(4).to("refdev"), torch.accelerator.synchronize):
        torch.accelerator.synchronize()
        start = time.monotonic()
        refdev.occupy(0.3)
        read()
        seconds.append(time.monotonic() - start)
    return seconds


def counts() -> list[dict[str, int]]:
    refdev = register()
    x = torch.ones(4, device="refdev")
    results = []
    for read in (x.sum().item, lambda: x.to("cpu"), lambda: torch.ones(3).to("refdev"), lambda: x + 1):
        with counted(refdev) as changes:
            read()
        results.append(changes)
    return results


def read_by_the_host() -> None:
    register()
    x = torch.ones(4, device="refdev")
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 4)


def streams() -> tuple[float, float, float, float]:
    """Return what a second stream reads of a value that the first one makes late: without an event, and with one."""
    refdev = register()
    second_stream = torch.Stream("refdev")
    values = []
    for is_ordered in (False, True):
        x = torch.zeros((), device="refdev")
        torch.accelerator.synchronize()
        refdev.occupy(LIMIT_SEC)
        x.add_(1)
        if is_ordered:
            second_stream.wait_stream(torch.accelerator.current_stream())
            refdev.release()
        with second_stream:
            values.append(x + 0)
        second_stream.synchronize()
        refdev.release()
    start, end = (torch.Event("refdev", enable_timing=True) for _ in range(2))
    start.record()
    refdev.occupy(LIMIT_SEC)
    end.record()
    is_early = float(end.query())
    time.sleep(0.2)
    refdev.release()
    end.synchronize()
    return values[0].item(), values[1].item(), start.elapsed_time(end), is_early


def error_that_stays() -> list[str]:
    refdev = register()
    x, index = torch.ones(3, device="refdev"), torch.tensor([7], device="refdev")
    messages = []
    refdev.occupy(LIMIT_SEC)
    total = x[index].sum()  # the host learns of it later
    refdev.release()
    for read in (total.item, torch.accelerator.synchronize, lambda: x + 1):
        try:
            read()
        except torch.AcceleratorError as error:
            messages.append(str(error).splitlines()[0])
    return messages


# -- training ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer that may be computed again in the backward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor
        if self.how == "plain":
            change = self.layers(x)
        else:
            change = checkpoint(self.layers, x, use_reentrant=self.how == "reentrant")
        return x + change


def difference_from_the_cpu(how: str, kind: str) -> float:
    """Train on both devices in the same way; return the largest difference of any weight. Two micro-batches a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # a second of imports
    from torch.distributed.tensor import DTensor

    join()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Block(how), Block(how), nn.Linear(8, 1))
    weights = {}
    for device in ("cpu", "refdev"):
        trained: nn.Module = copy.deepcopy(plain).to(device)
        if kind == "ddp":
            trained = DistributedDataParallel(trained)
        else:
            mesh = init_device_mesh(device, (dist.get_world_size(),))
            for layer in [*trained.children(), trained]:
                fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for step in range(4):
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
                x = torch.randn(4, 8, generator=generator).to(device).requires_grad_()
                trained(x).square().mean().backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained.parameters()]
        weights[device] = [weight.detach().cpu() for weight in full]
    return max(float((a - b).abs().max()) for a, b in zip(weights["cpu"], weights["refdev"], strict=True))


# -- collectives ------------------------------------------------------------------------------------------------------


def collective_of_a_busy_device() -> float:
    refdev = join()
    tensor = torch.ones(2, device="refdev")
    with busy(refdev):
        dist.all_reduce(tensor, async_op=True).wait()
        (tensor * 2).add_(1)
    return tensor.sum().item()


def collective_that_never_ends() -> None:
    join(timeout_sec=2.0)
    tensor = torch.ones(2, device="refdev")
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
        tensor.sum().item()
    time.sleep(10)
