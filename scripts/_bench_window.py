"""What a window costs: an add against reading the tensors, and many adds with one flush against as many reductions.

An add is timed in bursts, for one takes microseconds; a reduction in the same loop as all others (`_bench_loop`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from _bench_loop import Budget, Timings, interleaved
from bench_guard import Samples
from bench_reduction import key

from ddpstats import Max, Mean, StatsReducer, StatsWindow, Sum

KEYS = (10, 50, 1_000)
ADDS = 50
_TENSORS = 20_000  # in one burst


def add_costs(rounds: int) -> dict[int, Samples]:
    """Number of leaves -> "add", "marked", "float" -> seconds of the processor per call, of every round. Local."""
    found = {}
    for keys in KEYS:
        window, marking, stats, marked = StatsWindow(), StatsWindow(), _stats(keys), _marked(keys)

        def add(window: StatsWindow = window, stats: dict[str, torch.Tensor] = stats) -> None:
            window.add(stats, 8.0)

        def add_marked(window: StatsWindow = marking, stats: dict[str, Any] = marked) -> None:
            window.add(stats, 8.0)

        def read(stats: dict[str, torch.Tensor] = stats) -> None:
            [float(value) for value in stats.values()]

        calls: dict[str, Callable[[], None]] = {"add": add, "marked": add_marked, "float": read}
        samples: Samples = {name: [] for name in calls}
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(list(calls), len(calls)):
                samples[name].append(_burst(calls[name], max(1, _TENSORS // keys)))
        found[keys] = samples
        assert window.flush().values == {name: value.item() for name, value in stats.items()}
    return found


def _burst(call: Callable[[], None], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - started) / times


def flush_costs(keys: int, budget: Budget) -> Timings:
    """Seconds of "window", 50 adds and a flush, and of "reduce", 50 reductions of the same. Collective."""
    window, reducer, stats = StatsWindow(), StatsReducer(), _stats(keys)

    def windowed(_: int) -> object:
        for _ in range(ADDS):
            window.add(stats, 8.0)
        return window.flush()

    def reduced(_: int) -> None:
        for _ in range(ADDS):
            reducer(stats, 8.0)

    for number in range(3):
        windowed(number)
        reduced(number)
    return interleaved({"window": windowed, "reduce": reduced}, budget)


def _stats(keys: int) -> dict[str, torch.Tensor]:
    return {key(index): torch.tensor([float(index)]) for index in range(keys)}


def _marked(keys: int) -> dict[str, Any]:
    """Three leaves of four have a marker; three of four are tensors."""
    kinds = (Sum, lambda value: Max(value.item()), Mean, lambda value: value)
    return {name: kinds[index % 4](value) for index, (name, value) in enumerate(_stats(keys).items())}
