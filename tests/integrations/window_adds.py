"""Uneven adds of a training run's ranks to a window, and the flush that they must give, computed in another way."""

from __future__ import annotations

import math
from typing import Any

from ddpstats import Sum

RANKS = 2
KEYS = {"acc", "only0", "only1", "tokens", "rare"}


def added(rank: int, index: int) -> tuple[dict[str, Any], float] | None:
    """Stats and weight of a batch; None where this rank has none."""
    if rank == 1 and (index % 5 == 3 or index in range(10, 20)):
        return None
    stats: dict[str, Any] = {"acc": index / 7 + rank, f"only{rank}": -index / 3, "tokens": Sum(index + 1)}
    if (rank + index) % 4 == 0:
        stats["rare"] = float(index)
    return stats, 1.0 + (index + rank) % 3


def expected(first: int, end: int) -> dict[str, float]:
    """Return the flush of all ranks' batches from ``first`` to before ``end``."""
    held: dict[str, list[tuple[Any, float]]] = {}
    for index in range(first, end):
        for rank in range(RANKS):
            stats, weight = added(rank, index) or ({}, 0.0)
            for name, value in stats.items():
                held.setdefault(name, []).append((value, weight))
    totals = {"tokens": math.fsum(tokens.value for tokens, _ in held.pop("tokens"))} if held else {}
    means = {
        name: math.fsum(value * weight for value, weight in rows) / math.fsum(weight for _, weight in rows)
        for name, rows in held.items()
    }
    return totals | means


def close(numbers: dict[str, float], wanted: dict[str, float]) -> bool:
    return numbers.keys() == wanted.keys() and all(
        math.isclose(numbers[name], value, rel_tol=1e-12) for name, value in wanted.items()
    )
