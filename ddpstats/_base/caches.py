"""A small least-recently-used cache whose entries have a cost, so that a cache of huge entries stays small."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ALWAYS_KEPT = 4


class BoundedCache(Generic[K, V]):
    """At most ``max_entries`` entries of together at most ``max_cost``; but the newest few stay at any cost.

    Otherwise a program that takes turns with two huge trees would have every one of its entries evicted before its use.
    """

    def __init__(self, max_entries: int, max_cost: int, on_evict: Callable[[V], None] = lambda value: None) -> None:
        self._entries: dict[K, tuple[V, int]] = {}
        self._max_entries, self._max_cost, self._cost = max_entries, max_cost, 0
        self._on_evict = on_evict
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if len(self._entries) > self._max_entries // 2:  # order only matters when eviction is near
            with self._lock:
                if self._entries.pop(key, None) is not None:
                    self._entries[key] = entry
        return entry[0]

    def put(self, key: K, value: V, cost: int) -> V:
        with self._lock:
            previous = self._entries.pop(key, None)
            self._cost += cost - (previous[1] if previous else 0)
            self._entries[key] = (value, cost)
            while len(self._entries) > _ALWAYS_KEPT and (
                len(self._entries) > self._max_entries or self._cost > self._max_cost
            ):
                oldest, old_cost = self._entries.pop(next(iter(self._entries)))
                self._cost -= old_cost
                self._on_evict(oldest)
        return value

    def values(self) -> list[V]:
        return [value for value, _ in self._entries.values()]

    def clear(self) -> None:
        self._entries.clear()
        self._cost = 0

    def __len__(self) -> int:
        return len(self._entries)
