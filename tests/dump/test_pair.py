"""The join of two dumps by NAME."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

from ddpstats.dump.compare import _two_dumps
from ddpstats.dump.compare._two_dumps import Pair, pairs
from ddpstats.dump.format._scan import Member, Progress


class Listed:
    """A dump that is a list of names; counts what is read again."""

    def __init__(self, names: list[str]) -> None:
        self._members = [Member(name, f"{place}", place) for place, name in enumerate(names)]
        self.reread_count = 0

    def members(self, progress: Progress | None = None) -> Iterator[Member]:
        return iter(self._members)

    def reread(self, key: str, offset: int, size: int) -> Member:
        self.reread_count += 1
        return Member(key, f"{offset}", offset)


def joined(a: Listed, b: Listed) -> list[Pair]:
    return list(pairs(cast(Any, a), cast(Any, b)))


NAMES = st.lists(st.sampled_from("abcdefgh"), max_size=30)


@given(a=NAMES, b=NAMES, window=st.integers(0, 5))
@settings(deadline=None)
def test_every_entry_comes_once_with_its_partner(a: list[str], b: list[str], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_two_dumps, "_WINDOW", window)
        found = joined(Listed(a), Listed(b))
    assert sorted(pair.a.offset for pair in found if pair.a) == list(range(len(a)))
    assert sorted(pair.b.offset for pair in found if pair.b) == list(range(len(b)))
    both = [(pair.a, pair.b) for pair in found if pair.a and pair.b]
    assert Counter(one.key for one, _ in both) == Counter(a) & Counter(b)
    for name in set(a):
        of_name = sorted((one.offset, other.offset) for one, other in both if one.key == other.key == name)
        assert [place for _, place in of_name] == [p for p, other in enumerate(b) if other == name][: len(of_name)]
        assert [place for place, _ in of_name] == [p for p, other in enumerate(a) if other == name][: len(of_name)]


def test_equal_orders_keep_nothing() -> None:
    names = [str(number) for number in range(1000)]
    a, b = Listed(names), Listed(names)
    assert [(pair.index, pair.a == pair.b) for pair in joined(a, b)] == [(index, True) for index in range(1000)]
    assert a.reread_count == b.reread_count == 0


def test_one_entry_more_does_not_cost_reading_everything_twice() -> None:
    names = [str(number) for number in range(20_000)]
    a, b = Listed(["new", *names]), Listed(names)
    found = joined(a, b)
    assert [pair.index for pair in found if pair.b is None] == [0]
    assert b.reread_count <= _two_dumps._WINDOW
