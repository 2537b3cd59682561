"""What `Sentinel` costs, layer by layer: DDP training steps with it and without, interleaved on the same ranks.

A transformer with 25 norm layers. Six copies of it take turns, each with its own optimizer and DDP; one without any
sentinel. Layers that look at a step now and then are made to look at every step, and their extra time is divided by how
rarely they would: `Costs.ratios`. What layer 3 does in every step, keep the batch, is timed by itself: it is less than
the noise of whole steps.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _bench_loop import Budget, Spread, Timings, interleaved
from _rates_runs import Transformer, logging_off, step_fn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel

STEPS_MS = (100, 800)
"""A step takes at least as long, and up to twice that."""
DIGEST_EVERY, REPLAY_EVERY = 100, 1_000
BLOCKS, LENGTH = 12, 64  # two norms a block, and one
WIDTH = 256

_NEVER = 10**9
_OPTIONS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "thresholds": {},
    "digests": {"digest_every_steps": 1},
    "batches kept": {"replay_every_steps": _NEVER, "replay_fn": step_fn},
    "replay": {"replay_every_steps": 1, "replay_fn": step_fn},
    "window open": {"matmul_checksum": True},
}


@dataclass(frozen=True)
class Costs:
    """Seconds of a step under each of the options; ``keeping``: of what `Sentinel.micro_batch` does around it."""

    timings: Timings
    keeping: Mapping[str, float]

    def median(self, name: str) -> float:
        return self.timings.spread(name).median

    def ratios(self) -> dict[str, tuple[float, Spread | None]]:
        """Layer -> a step with it / a step without anything; layers 2 and 3 without what layer 1 costs."""
        plain = self.median("plain")
        digests = (self.median("digests") - self.median("thresholds")) / DIGEST_EVERY
        kept = self.keeping["batches kept"] - self.keeping["thresholds"]
        replays = kept + (self.median("replay") - self.median("batches kept")) / REPLAY_EVERY
        return {
            "layer 1, 25 checkpoints": self._ratio("thresholds"),
            f"layer 2, every {DIGEST_EVERY} steps": (1 + digests / plain, None),
            f"layer 3, every {REPLAY_EVERY:,} steps": (1 + replays / plain, None),
            "layer 4, window open": self._ratio("window open"),
        }

    def _ratio(self, name: str) -> tuple[float, Spread]:
        spread = self.timings.ratios(name, "plain")
        return spread.median, spread


def sentinel_costs(step_ms: int, width: int, budget: Budget) -> Costs:
    """Of a transformer of ``width``. Collective."""
    logging_off()
    tokens = _tokens(_sequences(1e-3 * step_ms, width))
    variants, sentinels = dict[str, Callable[[int], object]](), list[Sentinel]()
    keeping: dict[str, list[float]] = {name: [] for name in _OPTIONS}
    for name, options in _OPTIONS.items():
        model = _model(width)
        sentinel = None if options is None else Sentinel(model, mode=2, **options)
        if sentinel is not None:
            sentinels.append(sentinel)
        variants[name] = _step(model, sentinel, tokens, keeping[name], is_open=name == "window open")
    for number in range(3):
        for body in variants.values():
            body(number)
    timings = interleaved(variants, budget)
    for sentinel in sentinels:
        sentinel.close()
    return Costs(timings, {name: statistics.median(seconds) for name, seconds in keeping.items() if seconds})


def _step(
    model: DistributedDataParallel, sentinel: Sentinel | None, tokens: Tensor, keeping: list[float], *, is_open: bool
) -> Callable[[int], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def forward_and_backward() -> None:
        step_fn(model, tokens).backward()  # type: ignore[no-untyped-call]

    def watched(sentinel: Sentinel) -> None:
        if is_open:
            sentinel.check_matmuls(1)  # for this step: the other variants take turns in this process
        entering = time.perf_counter()
        with sentinel.micro_batch(tokens):
            entered = time.perf_counter()
            forward_and_backward()
            leaving = time.perf_counter()
        keeping.append(entered - entering + time.perf_counter() - leaving)
        sentinel.step()

    def body(_: int) -> None:
        if sentinel is None:
            forward_and_backward()
        else:
            watched(sentinel)
        optimizer.step()
        optimizer.zero_grad()

    return body


def _model(width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Transformer(width, BLOCKS, heads=4))


def _tokens(sequences: int) -> Tensor:
    return torch.arange(sequences * (LENGTH + 1)).reshape(sequences, -1) % 29


def _sequences(seconds: float, width: int) -> int:
    """As many as make a step so long, or up to twice that; the same number on every rank."""
    size = 1
    while _fastest(_step(_model(width), None, _tokens(size), [], is_open=False)) < seconds:
        size *= 2
    return size


def _fastest(body: Callable[[int], object]) -> float:
    seconds = []
    for number in range(4):
        started = time.perf_counter()
        body(number)
        seconds.append(time.perf_counter() - started)
    fastest = torch.tensor([min(seconds)])
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    return float(fastest)


EXAMS: dict[str, dict[str, Any]] = {
    "layer 2": {"digest_every_steps": 1},
    "layer 3": {"replay_every_steps": 1, "replay_fn": lambda model, x: model(x).square().mean()},
}


def exam_memory(layer: str, width: int) -> float:
    """Return by how much an exam raises the peak memory of this process, in bytes of the parameters. For one rank."""
    logging_off()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(16)))
    x = torch.randn(4, width)

    def peak_bytes(sentinel: Sentinel) -> int:
        for _ in range(3):
            model.zero_grad()
            with sentinel.micro_batch(x):
                model(x).square().mean().backward()
            sentinel.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    with Sentinel(model, mode=2) as sentinel:
        before = peak_bytes(sentinel)
    with Sentinel(model, mode=2, **EXAMS[layer]) as sentinel:
        rise = peak_bytes(sentinel) - before
    return rise / sum(parameter.nbytes for parameter in model.parameters())
