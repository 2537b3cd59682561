"""Time several variants of one thing against each other, inside ranks that must stay in step.

1. Every round runs each variant once, in an order that is drawn anew and is the same on all ranks, so that no variant
   always follows the same other one.
2. Before each variant the ranks meet in an all_reduce of one element, outside the timed part. A slow variant leaves its
   ranks out of step by more than a fast one takes; without the meeting the fast one would be charged for that. It does
   not favour anyone: all variants are timed from the same state, ranks together within microseconds and gloo's threads
   awake. What it hides, for all alike, is the wait for a late rank, which no library can shorten.
3. What a call returns is dropped after the clock has stopped: it is the caller's. The garbage collector stays on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Body = Callable[[int], object]
"""One call of a variant; takes the number of the round."""


@dataclass(frozen=True)
class Budget:
    """How long one interleaved loop may take: as many rounds as fit into ``seconds``, within limits."""

    seconds: float
    at_least: int
    at_most: int = 3000


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        if len(sample) < 2:
            return cls(sample[0], sample[0], sample[0], len(sample))
        lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(median, lower, upper, len(sample))


@dataclass(frozen=True)
class Timings:
    """Seconds per call of each variant, in order of the rounds, on one rank."""

    seconds: Mapping[str, Sequence[float]]

    def spread(self, variant: str) -> Spread:
        return Spread.of(self.seconds[variant])

    def ratio(self, variant: str, to: str) -> float:
        """Of the medians: what a round's luck does to one variant, it seldom does to the other."""
        return self.spread(variant).median / self.spread(to).median

    def ratios(self, variant: str, to: str) -> Spread:
        """Of the ratios round by round: tells how much `ratio` is worth."""
        return Spread.of([a / b for a, b in zip(self.seconds[variant], self.seconds[to], strict=True)])


def interleaved(variants: Mapping[str, Body], budget: Budget) -> Timings:
    """Time the variants round by round. Collective on the default group; the variants must have been run before."""
    meeting, names, orders = torch.zeros(1), list(variants), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def one_round(number: int) -> None:
        orders.shuffle(names)
        for name in names:
            body = variants[name]
            dist.all_reduce(meeting)
            started = time.perf_counter()
            result = body(number)
            seconds[name].append(time.perf_counter() - started)
            del result

    trial_started = time.perf_counter()
    trial = 2
    for number in range(trial):
        one_round(number)
    rounds = _agreed_rounds((time.perf_counter() - trial_started) / trial, budget)
    for sample in seconds.values():
        sample.clear()
    for number in range(rounds):
        one_round(number)
    return Timings(seconds)


def _agreed_rounds(round_sec: float, budget: Budget) -> int:
    """Rank 0's answer, on every rank. Even, so that what alternates does so evenly."""
    rounds = int(budget.seconds / round_sec)
    answer = torch.tensor([-(-max(budget.at_least, min(budget.at_most, rounds)) // 2) * 2])
    dist.broadcast(answer, 0)
    return int(answer.item())
