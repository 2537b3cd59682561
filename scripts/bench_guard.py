"""What the guard costs: the same collective with it and without, interleaved in one run on the same ranks.

A guard is entered and left around a burst of calls, so that all variants take turns within seconds of each other; the
median over all calls of a burst but the first few is compared round by round. TORCH_DISTRIBUTED_DEBUG=DETAIL is decided
when a process group is made, so it runs on ranks of its own, against plain calls of ranks of the same kind.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _bench_loop import Spread

from ddpstats.guard import collective_guard, notes_shm
from ddpstats.guard.labels.read import infer

SIZES = {"1 float": 1, "1M floats": 1_000_000}
BURST, _WARM = 30, 8
_LOSS = torch.zeros(1)

Samples = dict[str, list[float]]


def guard_costs(rounds: int, burst: int) -> dict[str, Samples]:
    """Seconds per call of each variant, a median per round, for each size. Collective on the default group.

    A round is ``burst`` calls of each variant, of which the first few warm up.
    """
    return {name: _costs(size, max(2, rounds // (4 if size > 1 else 1)), burst) for name, size in SIZES.items()}


def _costs(size: int, rounds: int, calls: int) -> Samples:
    tensor, order = torch.zeros(size), random.Random(0)
    stats = {"loss": tensor}

    def burst() -> float:
        seconds = []
        for _ in range(calls):
            for key in stats:  # a loop over keys, so that labels are inferred
                started = time.perf_counter()
                dist.all_reduce(stats[key])
                seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[min(_WARM, calls // 2) :])

    variants: dict[str, Callable[[], Any]] = {
        "plain": contextlib.nullcontext,
        "off": lambda: collective_guard("off"),
        "step": lambda: collective_guard("step"),
        "strict": lambda: collective_guard("strict"),
        "strict, over the store": _strict_over_the_store,
    }
    samples: Samples = {name: [] for name in variants}
    names = list(variants)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            with variants[name]():
                samples[name].append(burst())
    return samples


@contextlib.contextmanager
def _strict_over_the_store() -> Iterator[None]:
    """As between hosts: without shared memory."""
    with mock.patch.object(notes_shm._Shared, "of", side_effect=OSError), collective_guard("strict"):
        yield


def plain_costs(rounds: int) -> dict[str, list[float]]:
    """Seconds per call without any guard: for ranks that were started with TORCH_DISTRIBUTED_DEBUG=DETAIL, or not."""
    found = {}
    for name, size in SIZES.items():
        tensor = torch.zeros(size)
        seconds = []
        for _ in range(_WARM + rounds * (BURST if size == 1 else 4)):
            started = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - started)
        found[name] = seconds[_WARM:]
    return found


def ddp_step_costs(rounds: int) -> Samples:
    """Seconds of a DDP training step of some 20 ms, in mode "step" and without."""
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    )
    given, order = torch.randn(128, 512), random.Random(0)
    samples: Samples = {"plain": [], "step": []}

    def steps(each: Callable[[], None]) -> float:
        seconds = []
        for _ in range(6):
            started = time.perf_counter()
            model(given).square().mean().backward()
            each()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    names = list(samples)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            if name == "plain":
                samples[name].append(steps(lambda: None))
            else:
                with collective_guard("step") as guard:
                    samples[name].append(steps(guard.step))
    return samples


def label_costs(rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor for one label, at a site that was called before. Local."""
    stats = {f"key{number}": torch.zeros(1) for number in range(100)}
    walks = {"nothing to find": _unnamed, "a dict's walk": _walk, "through helpers two deep": _through_helpers}
    found: dict[str, list[float]] = {name: [] for name in walks}
    for number in range(rounds + 1):
        for name, walk in walks.items():
            started = time.thread_time()
            walk(stats)
            if number:  # the first call of a site parses its file
                found[name].append((time.thread_time() - started) / len(stats))
    return found


def _label(tensor: torch.Tensor) -> None:
    infer(sys._getframe(1))


def _unnamed(stats: dict[str, torch.Tensor]) -> None:
    for _ in range(len(stats)):
        _label(_LOSS)


def _walk(stats: dict[str, torch.Tensor]) -> None:
    for _, value in stats.items():
        _label(value)


def _through_helpers(stats: dict[str, torch.Tensor]) -> None:
    for _, value in stats.items():
        _outer(value)


def _outer(value: torch.Tensor) -> None:
    _inner(value)


def _inner(value: torch.Tensor) -> None:
    _label(value)


def ratio(samples: Samples, variant: str) -> Spread:
    """Of ``variant`` to plain, round by round."""
    return Spread.of([a / b for a, b in zip(samples[variant], samples["plain"], strict=True)])
