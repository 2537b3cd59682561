"""A least-recently-used cache whose entries have a cost, so that a cache of huge entries stays small."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ALWAYS_KEPT = 4


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
