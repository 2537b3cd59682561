"""What NaNCapture costs: a DDP training step with it and without, interleaved in one run on the same ranks.

Two copies of one model take turns, each with its own optimizer and DDP. The step is a forward and backward pass, the
optimizer and, with capture, `micro_batch` and `check`. Some 60 parameters, as many hooks.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time

import torch
import torch.distributed as dist
from _bench_loop import Budget, Timings, interleaved
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture

STEPS_MS = (80, 400)
"""A step takes at least as long, and up to twice that."""


def capture_costs(step_ms: int, budget: Budget) -> tuple[Timings, dict[str, float]]:
    """Seconds per step ("plain", "capture"), and microseconds of the parts of the latter. Collective."""
    plain, watched = _trainer(), _trainer()
    size = _batch_size(plain, 1e-3 * step_ms)
    batch = torch.randn(size, 3, 32, 32), torch.zeros(size, dtype=torch.int64)
    parts: dict[str, list[float]] = {"enter and leave micro_batch": [], "check": []}
    with (
        tempfile.TemporaryDirectory() as scratch,
        NaNCapture(scratch, model=watched[0], optimizer=watched[1]) as capture,
    ):

        def bare(_: int) -> None:
            module, optimizer = plain
            nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

        def captured(_: int) -> None:
            module, optimizer = watched
            started = time.perf_counter()
            with capture.micro_batch(batch):
                entered = time.perf_counter()
                nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
                leaving = time.perf_counter()
            left = time.perf_counter()
            capture.check()
            parts["enter and leave micro_batch"].append(entered - started + left - leaving)
            parts["check"].append(time.perf_counter() - left)
            optimizer.step()
            optimizer.zero_grad()

        for number in range(3):
            bare(number)
            captured(number)
        timings = interleaved({"plain": bare, "capture": captured}, budget)
    return timings, {name: 1e6 * sorted(seconds)[len(seconds) // 2] for name, seconds in parts.items()}


def captured_peak(layers: int, is_captured: bool) -> float:
    """Peak resident memory of this process after a step with a NaN, in multiples of the parameters (25 MiB a layer)."""
    model = nn.Sequential(*[nn.Linear(2560, 2560, bias=False) for _ in range(layers)])
    batch = torch.full((2, 2560), torch.nan)
    with tempfile.TemporaryDirectory() as scratch, NaNCapture(scratch, model=model) as capture:
        with capture.micro_batch(batch) if is_captured else contextlib.nullcontext():
            model(batch).sum().backward()
        if is_captured:
            capture.check()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / parameter_bytes


def _trainer() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), *[(16, 16)] * 5, (16, 32), *[(32, 32)] * 7):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10))
    module = DistributedDataParallel(net)
    return module, torch.optim.AdamW(net.parameters())


def _batch_size(trainer: tuple[DistributedDataParallel, torch.optim.Optimizer], seconds: float) -> int:
    """As many images as make a step so long, or up to twice that; the same number on every rank."""
    module, _ = trainer
    size = 1
    while _seconds(module, torch.randn(size, 3, 32, 32)) < seconds:
        size *= 2
    return size


def _seconds(module: DistributedDataParallel, images: torch.Tensor) -> float:
    """Of the fastest of a few passes on the fastest rank: the first ones warm up."""
    passes = []
    for _ in range(4):
        started = time.perf_counter()
        module(images).sum().backward()
        module.zero_grad()
        passes.append(time.perf_counter() - started)
    fastest = torch.tensor([min(passes)])
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    return float(fastest)
