"""`walk` yields every leaf of a container once, under the path that users read."""

from __future__ import annotations

import collections
from types import SimpleNamespace

from ddpstats._base.containers import walk

Pair = collections.namedtuple("Pair", ["left", "right"])


def test_what_a_namedtuple_holds_is_reached_by_place_or_by_field() -> None:
    value = {"a": [Pair(1, (2,))]}
    assert list(walk(value)) == [("batch['a'][0][0]", 1), ("batch['a'][0][1][0]", 2)]
    assert list(walk(value, "x", by_field=True)) == [("x['a'][0].left", 1), ("x['a'][0].right[0]", 2)]


def test_a_dataclass_that_comes_back_as_a_namespace_is_walked() -> None:
    assert list(walk([SimpleNamespace(x=1, y=[2])])) == [("batch[0].x", 1), ("batch[0].y[0]", 2)]


def test_what_lies_inside_itself_is_a_leaf() -> None:
    endless: list[object] = [1]
    endless.append(endless)
    assert list(walk(endless)) == [("batch[0]", 1), ("batch[1]", endless)]
