"""Rows of `scripts/bench.py` on the guard, and on the labels that it infers.

A guard is of the whole process, so it is entered and left around a burst of calls.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_rows import Row, Variant, burst, ratios, take_turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import collective_guard
from ddpstats.guard import notes_shm
from ddpstats.guard.labels.read import infer

_SIZES = {"1 float": 1, "1M floats": 1_000_000}
_LIMITS = {
    "1 float": {"off": 1.0, "step": 1.5, "strict": 1.9, "strict, over the store": 3.5},
    "1M floats": {"off": 1.0, "step": 1.1, "strict": 1.2, "strict, over the store": 1.4},
}
_LOSS = torch.zeros(1)


def guard(seconds: float, size: str) -> list[Row]:
    """Return an all_reduce in each mode, and with TORCH_DISTRIBUTED_DEBUG=DETAIL, as times of the plain one."""
    stats = {"loss": torch.zeros(_SIZES[size])}
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    detailed = dist.new_group(backend="gloo")
    dist.set_debug_level(dist.DebugLevel.OFF)

    def variant(context: Callable[[], Any], group: Any = None) -> Variant:
        def call() -> None:
            for key in stats:  # a loop over keys, so that labels are inferred
                dist.all_reduce(stats[key], group=group)

        def run(_: int) -> tuple[float, float]:
            with context():
                return burst(call, calls=30, warm=8)

        return run

    variants = {
        "plain": variant(contextlib.nullcontext),
        "off": variant(lambda: collective_guard("off")),
        "step": variant(lambda: collective_guard("step")),
        "strict": variant(lambda: collective_guard("strict")),
        "strict, over the store": variant(_strict_over_the_store),
        "DETAIL": variant(contextlib.nullcontext, detailed),
    }
    times = take_turns(variants, seconds)
    limits = _LIMITS[size]
    rows = [Row(f"guard {mode}, {size} / plain", ratios(times, mode, "plain"), limits[mode]) for mode in limits]
    return [*rows, Row(f"TORCH_DISTRIBUTED_DEBUG=DETAIL, {size} / plain", ratios(times, "DETAIL", "plain"))]


@contextlib.contextmanager
def _strict_over_the_store() -> Iterator[None]:
    """Enter a guard that compares as between hosts: without shared memory."""
    with mock.patch.object(notes_shm._SharedMemory, "of", side_effect=OSError), collective_guard("strict"):
        yield


def guard_ddp_step(seconds: float) -> list[Row]:
    """Return a DDP training step of 20 to 40 ms in mode "step" as times of one without a guard."""
    module = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    batch = torch.randn(128, 512)

    def train(judge: Callable[[], object]) -> None:
        module(batch).square().mean().backward()
        judge()

    def guarded(_: int) -> tuple[float, float]:
        with collective_guard("step") as guard:
            return burst(lambda: train(guard.step), calls=12, warm=2)

    times = take_turns({"plain": lambda _: burst(lambda: train(int), calls=12, warm=2), "step": guarded}, seconds)
    return [Row("guard step, a DDP step / plain", ratios(times, "step", "plain"), 1.01)]


# -- labels -----------------------------------------------------------------------------------------------------------


def guard_labels(seconds: float) -> list[Row]:
    """Return microseconds of the processor for one label, at a call site that was called before. For one rank."""
    stats = {f"key{number}": torch.zeros(1) for number in range(100)}

    def variant(walk: Callable[[dict[str, Tensor]], None]) -> Variant:
        def run(_: int) -> tuple[float, float]:
            started = time.thread_time()
            walk(stats)
            return started, time.thread_time()

        return run

    walks = {"nothing to find": _unnamed, "a dict's walk": _walk, "through helpers two deep": _through_helpers}
    limits = {"nothing to find": 4.0, "a dict's walk": 30.0}
    times = take_turns({name: variant(walk) for name, walk in walks.items()}, seconds)
    return [
        Row(f"a label, {name}", [1e6 * sample / len(stats) for sample in samples], limits.get(name), "us")
        for name, samples in times.items()
    ]


def _label(tensor: Tensor) -> None:
    infer(sys._getframe(1))


def _unnamed(stats: dict[str, Tensor]) -> None:
    for _ in range(len(stats)):
        _label(_LOSS)


def _walk(stats: dict[str, Tensor]) -> None:
    for _, value in stats.items():
        _label(value)


def _through_helpers(stats: dict[str, Tensor]) -> None:
    for _, value in stats.items():
        _outer(value)


def _outer(value: Tensor) -> None:
    _inner(value)


def _inner(value: Tensor) -> None:
    _label(value)
