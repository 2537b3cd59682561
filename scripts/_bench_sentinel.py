"""What `Sentinel` costs, layer by layer: DDP training steps with it and without, interleaved on the same ranks.

A transformer with 25 norm layers. Copies of it take turns, each with its own optimizer and DDP; one without any
sentinel. Layers that look at a step now and then are made to look at every step, and their extra time is divided by how
rarely they would: `Costs.ratios`. What layer 3 does in every step, keep the batch, is timed by itself: it is less than
the noise of whole steps.

Layer 4 takes no turns: for seconds after a window has closed, every product of the process pays a little for it, also
those of the others. Steps with the window open follow on steps without; before the next cycle nothing is left of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from _bench_loop import Budget, Spread, Timings, interleaved
from _rates_runs import Transformer, logging_off, step_fn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel
from ddpstats.sentinel._matmul import ChecksumWindow

STEPS_MS = (100, 800)
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
}
_WINDOW_SHARE = 1 / 6  # of the time, for each of its two loops
_CYCLE_SEC = 20.0  # of the time for one of their cycles
_TIDY_SEC = 6.0  # more than what `ChecksumWindow.tidy` waits for


@dataclass(frozen=True)
class Costs:
    """Seconds of a step under each of the options; ``keeping``: of what `Sentinel.micro_batch` does around it.

    ``window``: with layer 4's window open, and before it was opened.
    """

    timings: Timings
    window: Timings
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
            "layer 4, window open": self._window_ratio(),
        }

    def _ratio(self, name: str) -> tuple[float, Spread]:
        spread = self.timings.ratios(name, "plain")
        return spread.median, spread

    def _window_ratio(self) -> tuple[float, Spread]:
        plain = self.window.spread("plain").median
        spread = Spread.of([seconds / plain for seconds in self.window.seconds["open"]])
        return spread.median, spread


def sentinel_costs(step_ms: int, budget: Budget) -> Costs:
    """Collective."""
    logging_off()
    tokens = _tokens(_sequences(1e-3 * step_ms))
    variants, sentinels = dict[str, Callable[[int], object]](), list[Sentinel]()
    keeping: dict[str, list[float]] = {name: [] for name in _OPTIONS}
    for name, options in _OPTIONS.items():
        model = _model()
        sentinel = None if options is None else Sentinel(model, mode=2, **options)
        if sentinel is not None:
            sentinels.append(sentinel)
        variants[name] = _step(model, sentinel, tokens, keeping[name])
    for number in range(3):
        for body in variants.values():
            body(number)
    timings = interleaved(variants, budget)
    for sentinel in sentinels:
        sentinel.close()
    window = _window_timings(variants["plain"], tokens, budget)
    return Costs(timings, window, {name: statistics.median(seconds) for name, seconds in keeping.items() if seconds})


def _window_timings(plain: Callable[[int], object], tokens: Tensor, budget: Budget) -> Timings:
    """Cycles of two loops: "plain", and "open"."""
    cycles = max(1, int(budget.seconds // _CYCLE_SEC))
    share = replace(budget, seconds=budget.seconds * _WINDOW_SHARE / cycles, at_least=max(2, budget.at_least // cycles))
    model, seconds = _model(), dict[str, list[float]](plain=[], open=[])
    for cycle in range(cycles):
        if cycle:
            time.sleep(_TIDY_SEC)
            ChecksumWindow.tidy()
        seconds["plain"] += interleaved({"plain": plain}, share).seconds["plain"]
        with Sentinel(model, mode=2, matmul_checksum=True) as sentinel:
            body = _step(model, sentinel, tokens, [], is_open=True)
            for number in range(3):
                body(number)
            seconds["open"] += interleaved({"open": body}, share).seconds["open"]
    return Timings(seconds)


def _step(
    model: DistributedDataParallel,
    sentinel: Sentinel | None,
    tokens: Tensor,
    keeping: list[float],
    *,
    is_open: bool = False,
) -> Callable[[int], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def forward_and_backward() -> None:
        step_fn(model, tokens).backward()  # type: ignore[no-untyped-call]

    def watched(sentinel: Sentinel) -> None:
        if is_open:
            sentinel.check_matmuls(2)  # this step and one more, so that it never shuts
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


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Transformer(WIDTH, BLOCKS, heads=4))


def _tokens(sequences: int) -> Tensor:
    return torch.arange(sequences * (LENGTH + 1)).reshape(sequences, -1) % 29


def _sequences(seconds: float) -> int:
    """As many as make a step so long, or up to twice that; the same number on every rank."""
    size = 1
    while _fastest(_step(_model(), None, _tokens(size), [])) < seconds:
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
