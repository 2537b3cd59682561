"""Caches of bounded size: one whose entries have a cost, and drops the least recently used; one that is emptied."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ALWAYS_KEPT = 4


class EmptiedCache(dict[K, V]):
    """A dict that is emptied when it is full: for a hot path, and values that can be worked out again.

    ``cache.get(key) or cache.keep(key, work_out())`` costs one look where the value is there.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def keep(self, key: K, value: V) -> V:
        """Keep the value, and return it."""
        if len(self) >= self._max_entries:
            self.clear()
        self[key] = value
        return value


class BoundedCache(Generic[K, V]):
    """Holds at most ``max_entries`` entries of at most ``max_cost`` together, and the newest four at any cost.

    Otherwise a program that alternates between two huge trees would have each entry evicted before its use.
    """

    def __init__(self, max_entries: int, max_cost: int) -> None:
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._max_entries, self._max_cost, self._cost = max_entries, max_cost, 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if len(self._entries) > self._max_entries // 2:  # the order only matters when eviction is near
            with self._lock:
                if key in self._entries:
                    self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, cost: int) -> V:
        with self._lock:
            _, old_cost = self._entries.pop(key, (value, 0))
            self._entries[key] = (value, cost)
            self._cost += cost - old_cost
            while len(self._entries) > _ALWAYS_KEPT and self._is_over_limit():
                _, (_, old_cost) = self._entries.popitem(last=False)
                self._cost -= old_cost
        return value

    def _is_over_limit(self) -> bool:
        return len(self._entries) > self._max_entries or self._cost > self._max_cost

    def values(self) -> list[V]:
        return [value for value, _ in self._entries.values()]

    def clear(self) -> None:
        self._entries.clear()
        self._cost = 0

    def __len__(self) -> int:
        return len(self._entries)
