"""What `Sentinel` costs, layer by layer: DDP training steps with it and without, interleaved on the same ranks.

A transformer with 25 norm layers. Six copies of it take turns, each with its own optimizer and DDP; one without any
sentinel. Layers that look at a step now and then are made to look at every step, and their extra time is divided by how
rarely they would: `Costs.ratio`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _bench_loop import Budget, Timings, interleaved
from _rates_runs import Transformer, logging_off, step_fn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel

STEP_MS = 100
"""A step takes at least as long, and up to twice that."""
DIGEST_EVERY, REPLAY_EVERY = 100, 1_000
BLOCKS, WIDTH, LENGTH = 12, 256, 64  # two norms a block, and one

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
    """Seconds of a step under each of the options."""

    timings: Timings

    def median(self, name: str) -> float:
        return self.timings.spread(name).median

    def ratios(self) -> dict[str, float]:
        """Layer -> a step with it / a step without anything. Layers 2 and 3 beside what layer 1 costs."""
        plain, first = self.median("plain"), self.median("thresholds")
        digests = (self.median("digests") - first) / DIGEST_EVERY
        kept = self.median("batches kept") - first
        replays = kept + (self.median("replay") - self.median("batches kept")) / REPLAY_EVERY
        return {
            "1, thresholds at 25 checkpoints": first / plain,
            f"2, digests every {DIGEST_EVERY} steps": 1 + digests / plain,
            f"3, peer replay every {REPLAY_EVERY} steps": 1 + replays / plain,
            "4, matmul checksum, window open": self.median("window open") / plain,
        }


def sentinel_costs(step_ms: int, budget: Budget) -> Timings:
    """Seconds per step of each variant. Collective."""
    logging_off()
    tokens = _tokens(_sequences(1e-3 * step_ms))
    variants, sentinels = dict[str, Callable[[int], object]](), list[Sentinel]()
    for name, options in _OPTIONS.items():
        model = _model()
        sentinel = None if options is None else Sentinel(model, mode=2, **options)
        if sentinel is not None:
            sentinels.append(sentinel)
        variants[name] = _step(model, sentinel, tokens, is_open=name == "window open")
    for number in range(3):
        for body in variants.values():
            body(number)
    timings = interleaved(variants, budget)
    for sentinel in sentinels:
        sentinel.close()
    return timings


def _step(
    model: DistributedDataParallel, sentinel: Sentinel | None, tokens: Tensor, *, is_open: bool
) -> Callable[[int], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def body(_: int) -> None:
        if is_open and sentinel is not None:
            sentinel.check_matmuls(1)  # for this step: the other variants take turns in this process
        if sentinel is None:
            step_fn(model, tokens).backward()  # type: ignore[no-untyped-call]
        else:
            with sentinel.micro_batch(tokens):
                step_fn(model, tokens).backward()  # type: ignore[no-untyped-call]
            sentinel.step()
        optimizer.step()
        optimizer.zero_grad()

    return body


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Transformer(WIDTH, BLOCKS, heads=4))


def _tokens(sequences: int) -> Tensor:
    return torch.arange(sequences * (LENGTH + 1)).reshape(sequences, -1) % 29


def _sequences(seconds: float) -> int:
    """As many as make a step so long, or up to twice that; the same number on every rank."""
    size = 1
    while _fastest(_step(_model(), None, _tokens(size), is_open=False)) < seconds:
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
