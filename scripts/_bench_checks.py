"""What a step pays for all checks together: a DDP step of 24 layers without, with each check's own call, and in one.

Every variant has a copy of the model with its own DDP and optimizer, for hooks stay on a model. A guard is of the whole
process, so each variant takes its turn of a few steps, entered and left outside of the clock; medians of a turn are
compared round by round. On two busy cores each small collective waits for a time slice, whoever issues it: "bare" is
the plain step with one all_reduce of 8 bytes after its backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _bench_loop import Spread
from bench_guard import Samples
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture, Sentinel, StatsReducer, StatsWindow, StepChecks, collective_guard
from ddpstats.testing import count_collectives

STEP_MS = 100
"""A step takes at least as long, and up to twice that."""
LAYERS, WIDTH, KEYS = 24, 256, 10
_TURN, _WARM = 5, 2  # steps, and those of them that are not timed

EVERY = ("guard", "capture", "sentinel")


@dataclass(frozen=True)
class Variant:
    """``parts``: which checks. ``together``: in one call. ``stats``: reduced by a call of their own.

    ``window``: stats added to a window, which is flushed after the turn, and outside of the clock.
    """

    parts: tuple[str, ...] = ()
    together: bool = False
    stats: bool = False
    bare: bool = False
    window: bool = False


@dataclass(frozen=True)
class ChecksCosts:
    """Of each variant: seconds of a step, a median per round; and how many collectives of ours a step has."""

    samples: Samples
    collectives: Mapping[str, float]

    def ratio(self, variant: str, to: str) -> Spread:
        """Round by round."""
        return Spread.of([a / b for a, b in zip(self.samples[variant], self.samples[to], strict=True)])


VARIANTS = {
    "plain": Variant(),
    "bare": Variant(bare=True),
    "guard": Variant(("guard",)),
    "capture": Variant(("capture",)),
    "sentinel": Variant(("sentinel",)),
    "stats": Variant(stats=True),
    "apart": Variant(EVERY),
    "apart, stats": Variant(EVERY, stats=True),
    "together": Variant(EVERY, True),
    "together, stats": Variant(EVERY, True, stats=True),
    "together, window": Variant(EVERY, True, window=True),
}


def checks_costs(step_ms: int, rounds: int) -> ChecksCosts:
    """Collective."""
    batch = torch.randn(_batch_size(1e-3 * step_ms), WIDTH)
    samples: Samples = {name: [] for name in VARIANTS}
    with contextlib.ExitStack() as stack:
        turns = {name: _turn(variant, batch, stack) for name, variant in VARIANTS.items()}
        for turn in turns.values():
            turn()
        names, order = list(turns), random.Random(0)
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                samples[name].append(turns[name]())
        return ChecksCosts(samples, {name: _collectives(turn) for name, turn in turns.items()})


def _collectives(turn: Callable[[], float]) -> float:
    """Of a step, apart from DDP's own, which C++ issues."""
    with count_collectives() as seen:
        turn()
    return seen.total / _TURN


def _turn(variant: Variant, batch: Tensor, stack: contextlib.ExitStack) -> Callable[[], float]:
    """A few steps; the median of their seconds."""
    module = _model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    guard = collective_guard("step") if "guard" in variant.parts else None
    capture = sentinel = None
    if "capture" in variant.parts:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        capture = stack.enter_context(NaNCapture(scratch, model=module, optimizer=optimizer))
    if "sentinel" in variant.parts:
        sentinel = stack.enter_context(Sentinel(module, mode=2))
    calls = _calls(variant, guard, capture, sentinel, len(batch))
    window = StatsWindow(name="bench") if variant.window else None
    if window is not None:
        calls.append(functools.partial(window.add, _stats(), len(batch)))
    watches: list[Any] = [part for part in (capture, sentinel) if part is not None]

    def step() -> None:
        with contextlib.ExitStack() as micro:
            for watch in watches:
                micro.enter_context(watch.micro_batch(batch))
            module(batch).square().mean().backward()
        for call in calls:
            call()
        optimizer.step()
        optimizer.zero_grad()

    def turn() -> float:
        seconds = []
        with guard or contextlib.nullcontext():
            for _ in range(_TURN):
                started = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[_WARM:])

    def turn_and_flush() -> float:
        found = turn()
        if window is not None:
            window.flush()
        return found

    return turn_and_flush


def _calls(
    variant: Variant,
    guard: collective_guard | None,
    capture: NaNCapture | None,
    sentinel: Sentinel | None,
    batch_size: int,
) -> list[Callable[[], object]]:
    """What the step calls after its backward pass."""
    calls: list[Callable[[], object]] = []
    if variant.together:
        calls.append(StepChecks(capture=capture, sentinel=sentinel, guard=guard).step)
    else:
        calls += [guard.step] if guard is not None else []
        calls += [capture.check] if capture is not None else []
        calls += [sentinel.step] if sentinel is not None else []
    if variant.bare:
        calls.append(_bare_all_reduce())
    if variant.stats:
        reducer = StatsReducer(name="bench")
        stats = _stats()
        calls.append(lambda: reducer(stats, batch_size))
    return calls


def _stats() -> dict[str, Tensor]:
    return {f"loss_{number}": torch.ones(1) for number in range(KEYS)}


def _bare_all_reduce() -> Callable[[], object]:
    group: Any = dist.new_group(backend="gloo", group_desc="bench")
    options, tensor = dist.AllreduceOptions(), torch.zeros(1, dtype=torch.float64)
    return lambda: group.allreduce([tensor], options).wait()


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers))


def _batch_size(seconds: float) -> int:
    """As many rows as make a step so long, or up to twice that; the same number on every rank."""
    module, size = _model(), 8
    while _fastest(module, torch.randn(size, WIDTH)) < seconds:
        size *= 2
    return size


def _fastest(module: nn.Module, batch: Tensor) -> float:
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        module(batch).square().mean().backward()
        module.zero_grad()
        seconds.append(time.perf_counter() - started)
    fastest = torch.tensor([min(seconds)])
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    return float(fastest)
