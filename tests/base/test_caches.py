"""A cache that is full is emptied; four entries stay at any cost."""

from __future__ import annotations

from ddpstats._base.caches import EmptiedCache


def test_cache_that_is_full_is_emptied_for_the_next_entry() -> None:
    cache = EmptiedCache[int, str](2)
    assert [cache.get(number) or cache.keep(number, str(number)) for number in (1, 2, 1)] == ["1", "2", "1"]
    assert cache.keep(3, "3") == "3"
    assert cache == {3: "3"}


def test_cache_whose_entries_cost_too_much_is_emptied() -> None:
    cache = EmptiedCache[int, int](100, max_cost=100)
    for number in range(10):
        cache.keep(number, number, cost=10)
    assert list(cache) == list(range(10))
    cache.keep(10, 10, cost=1)
    assert list(cache) == [10]
    cache.clear()
    for number in range(10):
        cache.keep(number, number, cost=10)
    assert list(cache) == list(range(10))


def test_four_entries_stay_at_any_cost() -> None:
    cache = EmptiedCache[int, int](8, max_cost=1000)
    for number in range(4):
        cache.keep(number, number, cost=10**6)
    assert list(cache) == [0, 1, 2, 3]
    cache.keep(4, 4, cost=10**6)
    assert list(cache) == [4]


def test_an_entry_that_is_kept_again_costs_nothing_more() -> None:
    cache = EmptiedCache[int, int](100, max_cost=100)
    for number in range(5):
        cache.keep(number, number, cost=10)
    for _ in range(100):
        cache.keep(0, 1, cost=10)
    assert cache == {0: 1, 1: 1, 2: 2, 3: 3, 4: 4}
