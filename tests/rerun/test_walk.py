"""`walk` yields every leaf of a container once, under the path that users read."""

from __future__ import annotations

import collections
from types import SimpleNamespace

from ddpstats._rerun.record import walk

Pair = collections.namedtuple("Pair", ["left", "right"])


def test_leaves_have_the_path_that_users_write() -> None:
    assert list(walk({"a": [Pair(1, (2,))]})) == [("batch['a'][0].left", 1), ("batch['a'][0].right[0]", 2)]


def test_walk_enters_the_namespace_that_represents_a_dataclass() -> None:
    assert list(walk([SimpleNamespace(x=1, y=[2])])) == [("batch[0].x", 1), ("batch[0].y[0]", 2)]


def test_container_that_contains_itself_is_a_leaf() -> None:
    endless: list[object] = [1]
    endless.append(endless)
    assert list(walk(endless)) == [("batch[0]", 1), ("batch[1]", endless)]
