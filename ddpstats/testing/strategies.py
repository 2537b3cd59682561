"""Hypothesis strategies for stats that differ between ranks as they do in real programs.

One tree is drawn for the whole job, and each rank holds its own part of it: keys missing or in another order, lists of
other lengths, None, other number types. So ranks never conflict, unless a test makes them.

Needs ``ddpstats[testing]``; importing this module imports hypothesis, importing `ddpstats.testing` does not.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from ddpstats._reduction.ops import All, Any as AnyFlag, Max, Mean, Min, Sum

__all__ = ["RankStats", "keys", "leaf_values", "uneven_stats"]


@dataclass(frozen=True)
class RankStats:
    """The arguments that one rank passes to a reduction."""

    stats: Any
    weight: float


def keys() -> st.SearchStrategy[str | int]:
    """Dict keys: plain names, names with separators, any Unicode, and integers."""
    plain = st.sampled_from(["loss", "acc", "l1_loss", "snr_loss", "a/b", "a", "b", "0", "[0]", "x\\y", ""])
    return st.one_of(plain, plain, st.text(max_size=4), st.integers(-3, 3))


def leaf_values(*, nonfinite: bool = True) -> st.SearchStrategy[Any]:
    """Numbers as programs hold them: float, int, bool, float tensors (0-d or of one element), int64 ones of one."""
    numbers = st.floats(-1e6, 1e6, width=16) if not nonfinite else st.floats(width=16)
    dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    whole = st.integers(-1000, 1000)
    return st.one_of(
        numbers,
        whole,
        st.booleans(),
        st.builds(lambda v, dtype: torch.tensor(v, dtype=dtype), numbers, dtypes),
        st.builds(lambda v, dtype: torch.tensor([v], dtype=dtype), numbers, dtypes),
        st.builds(lambda v: torch.tensor([v]), whole),
    )


@st.composite
def uneven_stats(
    draw: st.DrawFn, world_size: int, *, max_depth: int = 3, nonfinite: bool = True, markers: bool = True
) -> list[RankStats]:
    """Stats and a weight for each of ``world_size`` ranks: parts of one tree, never in conflict.

    ``nonfinite``: also NaN and infinities. ``markers``: also Sum, Min, Max, Any, All and Mean with its own weight.
    """
    values, flags = leaf_values(nonfinite=nonfinite), st.booleans()
    own = st.builds(Mean, values, st.sampled_from([0.0, 2.0, 5.0]))
    marked = [*(st.builds(op, values) for op in (Sum, Min, Max)), *(st.builds(op, flags) for op in (AnyFlag, All)), own]
    leaves = st.sampled_from([values] * 3 + marked * markers).map(_or_none)
    part = draw(_dicts(_trees(max_depth - 1, leaves)))
    weights = st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0, 100.0])
    return [RankStats(draw(part), draw(weights)) for _ in range(world_size)]


# A drawn tree is a strategy itself, which draws the part of it that one rank holds.
_Tree = st.SearchStrategy[Any]


def _or_none(tree: _Tree) -> _Tree:
    return st.integers(0, 9).flatmap(lambda chance: tree if chance else st.none())


def _trees(depth: int, leaves: st.SearchStrategy[_Tree]) -> st.SearchStrategy[_Tree]:
    if depth == 0:
        return leaves
    inner = _trees(depth - 1, leaves)
    sequences = st.builds(_sequence, st.sampled_from([list, tuple]), st.lists(inner, max_size=3))
    return st.one_of(leaves, _dicts(inner), sequences)


def _dicts(inner: st.SearchStrategy[_Tree]) -> st.SearchStrategy[_Tree]:
    return st.builds(_dict, st.sampled_from([dict, dict, OrderedDict]), st.dictionaries(keys(), inner, max_size=4))


def _dict(kind: type, children: dict[str | int, _Tree]) -> _Tree:
    """Draw some of the keys, in any order."""
    return _or_none(st.fixed_dictionaries({}, optional=children).map(kind))


def _sequence(kind: type, children: list[_Tree]) -> _Tree:
    """Draw the first few."""
    lengths = st.integers(0, len(children))
    return _or_none(lengths.flatmap(lambda length: st.tuples(*children[:length])).map(kind))
