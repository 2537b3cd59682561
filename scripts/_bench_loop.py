"""Time several variants of one thing against each other, inside ranks that must stay in step.

1. Every round runs each variant once, in an order that is drawn anew and is the same on all ranks, so that no variant
   always follows the same other one.
2. Before each variant the ranks meet in an all_reduce of one element, outside the timed part. A slow variant leaves its
   ranks out of step by more than a fast one takes; without the meeting the fast one would be charged for that.
3. The meeting has a bias of its own: rank 0 leaves it some 100 microseconds before rank 1, as long as a whole small
   all_reduce. Its own clock would add that to every variant and so draw all ratios towards 1. All ranks are on one host
   and share its monotonic clock, so a call is timed from when the last rank began to when the last one had its result.
4. What a call returns is dropped after the clock has stopped: it is the caller's. The garbage collector stays on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_TRIAL_ROUNDS = 2

Body = Callable[[int], object]
"""One call of a variant; takes the number of the round."""


@dataclass(frozen=True)
class Budget:
    """How long one interleaved loop may take: as many rounds as fit into ``seconds``, within limits.

    Where the limits are one number there is nothing to try out first.
    """

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
    """Seconds per call of each variant, in order of the rounds; the same on all ranks."""

    seconds: Mapping[str, Sequence[float]]

    def spread(self, variant: str) -> Spread:
        return Spread.of(self.seconds[variant])

    def ratio(self, variant: str, to: str) -> float:
        """Of the medians."""
        return self.spread(variant).median / self.spread(to).median

    def ratios(self, variant: str, to: str) -> Spread:
        """Of the ratios round by round: tells how much `ratio` is worth."""
        return Spread.of([a / b for a, b in zip(self.seconds[variant], self.seconds[to], strict=True)])


def interleaved(variants: Mapping[str, Body], budget: Budget) -> Timings:
    """Time the variants round by round. Collective on the default group; the variants must have been run before."""
    meeting, names, orders = torch.zeros(1), list(variants), random.Random(0)
    clocks: dict[str, list[float]] = {name: [] for name in names}  # start, end, start, end, ...

    def one_round(number: int) -> None:
        orders.shuffle(names)
        for name in names:
            body, times = variants[name], clocks[name]
            dist.all_reduce(meeting)
            started = time.perf_counter()
            result = body(number)
            times += started, time.perf_counter()
            del result

    rounds = budget.at_least
    if rounds < budget.at_most:
        trial_started = time.perf_counter()
        for number in range(_TRIAL_ROUNDS):
            one_round(number)
        rounds = _agreed_rounds((time.perf_counter() - trial_started) / _TRIAL_ROUNDS, budget)
        for times in clocks.values():
            times.clear()
    for number in range(rounds):
        one_round(number)
    return Timings({name: _durations(times) for name, times in clocks.items()})


def _durations(times: Sequence[float]) -> list[float]:
    """From the last rank's start to the last rank's end, call by call."""
    mine = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    started, ended = mine.view(-1, 2).unbind(1)
    return list((ended - started).tolist())


def _agreed_rounds(round_sec: float, budget: Budget) -> int:
    """Rank 0's answer, on every rank. Even, so that what alternates does so evenly."""
    rounds = int(budget.seconds / round_sec)
    answer = torch.tensor([-(-max(budget.at_least, min(budget.at_most, rounds)) // 2) * 2])
    dist.broadcast(answer, 0)
    return int(answer.item())
