"""A full `BoundedCache` drops what was used longest ago, and keeps the newest four; a full `EmptiedCache` drops all."""

from __future__ import annotations

from ddpstats._base.caches import BoundedCache, EmptiedCache


def test_cache_that_is_full_evicts_the_least_recently_used_entry() -> None:
    cache = BoundedCache[int, int](8, max_cost=1000)
    for number in range(8):
        cache.put(number, number, cost=1)
    assert cache.values() == list(range(8))
    assert cache.get(0) == 0  # now the most recently used
    cache.put(8, 8, cost=1)
    assert cache.values() == [2, 3, 4, 5, 6, 7, 0, 8]


def test_newest_four_entries_stay_at_any_cost() -> None:
    cache = BoundedCache[int, int](8, max_cost=1000)
    for number in range(6):
        cache.put(number, number, cost=10**6)
    assert cache.values() == [2, 3, 4, 5]


def test_cost_counts_only_the_entries_that_are_held() -> None:
    cache = BoundedCache[int, int](8, max_cost=100)
    for _ in range(20):
        cache.put(0, 0, cost=60)
    for number in range(1, 5):
        cache.put(number, number, cost=10)
    assert len(cache) == 5
    cache.put(5, 5, cost=1)
    assert cache.values() == [1, 2, 3, 4, 5]


def test_cache_that_is_full_is_emptied_for_the_next_entry() -> None:
    cache = EmptiedCache[int, str](2)
    assert [cache.get(number) or cache.keep(number, str(number)) for number in (1, 2, 1)] == ["1", "2", "1"]
    assert cache.keep(3, "3") == "3"
    assert cache == {3: "3"}
