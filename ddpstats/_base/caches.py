"""A cache of bounded size, for a hot path and values that can be worked out again."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ALWAYS_KEPT = 4


class EmptiedCache(dict[K, V]):
    """A dict that is emptied when it is full: when it has so many entries, or they cost so much together.

    ``cache.get(key) or cache.keep(key, work_out())`` costs one look where the value is there. Four entries are kept at
    any cost: otherwise a program that alternates between two huge trees would have each of them dropped before its use.
    """

    def __init__(self, max_entries: int, max_cost: float = math.inf) -> None:
        super().__init__()
        self._max_entries, self._max_cost, self._cost = max_entries, max_cost, 0

    def keep(self, key: K, value: V, cost: int = 0) -> V:
        """Keep the value, and return it."""
        if key not in self:
            costs_too_much = self._cost + cost > self._max_cost and len(self) >= _ALWAYS_KEPT
            if costs_too_much or len(self) >= self._max_entries:
                self.clear()
            self._cost += cost
        self[key] = value
        return value

    def clear(self) -> None:
        super().clear()
        self._cost = 0
