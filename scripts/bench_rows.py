"""Rows of `scripts/bench.py`, and the loop that times variants of one thing against each other on the same ranks.

1. Every round runs each variant once, in an order that is random and the same on all ranks, so that no variant always
   follows the same other one.
2. Before a `timed` call the ranks synchronise by an all_reduce of one element, outside of the timed part. A slow
   variant leaves its ranks out of step by more than a fast one takes, which would be charged to the fast one.
3. Rank 0 leaves that all_reduce some 100 microseconds before rank 1, as long as a whole small all_reduce. All ranks are
   on one host and share its monotonic clock, so a call is timed from the last rank's start to the last rank's end.
4. What a call returns is freed after the clock has stopped. The garbage collector stays on.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

_FEWEST_ROUNDS, _MOST_ROUNDS = 10, 3000
_QUICK_ROUNDS = 2
_NOISE = 2.0

Variant = Callable[[int], tuple[float, float]]
"""Runs once with the number of the round, and returns when it started and ended, in seconds."""
Seconds = Mapping[str, Sequence[float]]
"""Variant -> its seconds, in order of the rounds."""


class Row(NamedTuple):
    """One line of the table: a name, samples (one per round), and the limit of their median; no samples if skipped."""

    name: str
    samples: Sequence[float]
    limit: float | None = None
    unit: str = "x"
    at_least: bool = False

    @property
    def quartiles(self) -> tuple[float, ...]:
        if len(self.samples) < 2:
            return tuple(3 * self.samples) or (math.nan, math.nan, math.nan)
        return tuple(statistics.quantiles(self.samples, n=4, method="inclusive"))

    @property
    def verdict(self) -> str:
        """Return "noisy" where other programs' time is in the rounds: then even the median may be anything."""
        lower, median, upper = self.quartiles
        if self.limit is None or not self.samples:
            return "-"
        if upper > _NOISE * lower:
            return "noisy"
        is_kept = median >= self.limit if self.at_least else median <= self.limit
        return "ok" if is_kept else "short"

    def cells(self) -> tuple[str, ...]:
        limit = "-" if self.limit is None else f"{'>=' if self.at_least else '<='} {_number(self.limit)} {self.unit}"
        lower, median, upper = (_number(value) for value in self.quartiles)
        measured = f"{median} {self.unit}" if self.samples else "skipped"
        return self.name, limit, measured, f"{lower} .. {upper}" if len(self.samples) > 1 else "", self.verdict


def ratios(seconds: Seconds, variant: str, to: str) -> list[float]:
    """Return how many times as long ``variant`` takes as ``to``, round by round."""
    return [a / b for a, b in zip(seconds[variant], seconds[to], strict=True)]


def take_turns(variants: Mapping[str, Variant], seconds: float) -> dict[str, list[float]]:
    """Run the variants round by round, as many rounds as fit into ``seconds``; two if it is 0. Collective.

    A first round warms up, and two more measure how long a round takes; none of them counts.
    """
    order, names = random.Random(0), list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}  # start, end, start, end, ...

    def run_round(number: int) -> None:
        for name in order.sample(names, len(names)):
            times[name] += variants[name](number)

    run_round(0)
    rounds = _QUICK_ROUNDS
    if seconds:
        started = time.perf_counter()
        for number in range(2):
            run_round(number)
        rounds = _rounds_within(seconds, (time.perf_counter() - started) / 2)
    for clock in times.values():
        clock.clear()
    for number in range(rounds):
        run_round(number)
    return {name: _durations(clock) for name, clock in times.items()}


def _rounds_within(seconds: float, round_sec: float) -> int:
    """Return rank 0's number of rounds; it is even, so that what alternates does so evenly."""
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / round_sec)))
    agreed = torch.tensor([-(-rounds // 2) * 2])
    dist.broadcast(agreed, 0)
    return int(agreed)


def _durations(times: Sequence[float]) -> list[float]:
    latest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    started, ended = latest.view(-1, 2).unbind(1)
    return list((ended - started).tolist())


def timed(call: Callable[[int], object]) -> Variant:
    """Return a variant that times one ``call``, which takes the number of the round."""
    token = torch.zeros(1)

    def run(number: int) -> tuple[float, float]:
        dist.all_reduce(token)
        started = time.perf_counter()
        result = call(number)
        ended = time.perf_counter()
        del result
        return started, ended

    return run


def burst(call: Callable[[], object], calls: int, warm: int) -> tuple[float, float]:
    """Make ``calls`` calls in a row and return 0 and their median, without the first ``warm`` ones."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 0.0, statistics.median(seconds[warm:])


def size_for(seconds: float, step_of: Callable[[int], Callable[[], object]]) -> int:
    """Return a size of batches whose step takes so long, or up to twice that; the same on every rank. Collective."""
    size = 1
    while True:
        step = step_of(size)
        fastest = torch.tensor([min(burst(step, 1, 0)[1] for _ in range(4))])
        dist.all_reduce(fastest, dist.ReduceOp.MIN)
        if float(fastest) >= seconds:
            return size
        size *= 2


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Return a text table; the first line is its head."""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for name, *cells in lines:
        right = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, others, strict=True))
        texts.append(f"{name:<{first}}{right}")
    return "\n".join(text.rstrip() for text in [texts[0], "-" * len(texts[0]), *texts[1:]])


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value):
        return f"{int(value):,}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
