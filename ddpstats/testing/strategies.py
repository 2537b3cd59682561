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

_MARKERS = {"sum": Sum, "min": Min, "max": Max, "any": AnyFlag, "all": All, "own": Mean}


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
    tree = draw(_dicts(_trees(max_depth - 1, markers)))
    weights = st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0, 100.0])
    return [RankStats(draw(_part(tree, nonfinite)), draw(weights)) for _ in range(world_size)]


# A tree is ("leaf", op), ("dict" | "OrderedDict", {key: tree}) or ("list" | "tuple", [tree, ...]).
_Tree = tuple[str, Any]


def _trees(depth: int, markers: bool) -> st.SearchStrategy[_Tree]:
    ops = ["mean", "mean", "mean", *(_MARKERS if markers else ())]
    leaves = st.sampled_from(ops).map(lambda op: ("leaf", op))
    if depth == 0:
        return leaves
    inner = _trees(depth - 1, markers)
    sequences = st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=3))
    return st.one_of(leaves, leaves, _dicts(inner), sequences)


def _dicts(inner: st.SearchStrategy[_Tree]) -> st.SearchStrategy[_Tree]:
    return st.tuples(st.sampled_from(["dict", "dict", "OrderedDict"]), st.dictionaries(keys(), inner, max_size=4))


@st.composite
def _part(draw: st.DrawFn, tree: _Tree, nonfinite: bool) -> Any:
    """One rank's part of ``tree``."""
    kind, content = tree
    if draw(st.integers(0, 9)) == 0:
        return None
    if kind == "leaf":
        return draw(_leaf(content, nonfinite))
    if kind in ("dict", "OrderedDict"):
        held = draw(st.permutations([key for key in content if draw(st.integers(0, 3))]))
        items = [(key, draw(_part(content[key], nonfinite))) for key in held]
        return dict(items) if kind == "dict" else OrderedDict(items)
    length = draw(st.integers(0, len(content)))
    values = [draw(_part(child, nonfinite)) for child in content[:length]]
    return values if kind == "list" else tuple(values)


@st.composite
def _leaf(draw: st.DrawFn, op: str, nonfinite: bool) -> Any:
    if op == "mean":
        return draw(leaf_values(nonfinite=nonfinite))
    if op in ("any", "all"):
        return _MARKERS[op](draw(st.booleans()))
    value = draw(leaf_values(nonfinite=nonfinite))
    return Mean(value, draw(st.sampled_from([0.0, 2.0, 5.0]))) if op == "own" else _MARKERS[op](value)
