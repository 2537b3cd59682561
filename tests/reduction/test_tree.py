"""Stats to leaves and back, and the copy from an accelerator."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from ddpstats import Max, Mean
from ddpstats._agreement.status import Failure
from ddpstats._reduction.host_copy import HostCopy
from ddpstats._reduction.nesting import builder
from ddpstats._reduction.schema import MAX_DEPTH, Leaf, leaf_nodes
from ddpstats._reduction.tree import CannotFlatten, flatten
from ddpstats._reduction.values import Part, Prepared
from ddpstats.testing.strategies import RankStats, uneven_stats


@settings(deadline=None)
@given(uneven_stats(1))
def test_equal_signatures_have_equal_structures(parts: list[RankStats]) -> None:
    first, again = flatten(parts[0].stats), flatten(parts[0].stats)
    assert first.structure.schema == again.structure.schema
    assert list(map(id, first.leaves)) == list(map(id, again.leaves))
    assert first.structure.leaf_count == len(first.leaves)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1.0}, {"a": None}),
        ({"a": Mean(1.0)}, {"a": Mean(None)}),
        ({"a": Max(1.0)}, {"a": 1.0}),
        ({1: 1.0}, {"1": 1.0}),
        ({"a": [1.0]}, {"a": (1.0,)}),
        ({"a": [1.0, 2.0]}, {"a": [1.0]}),
        ({"a": 1.0}, OrderedDict(a=1.0)),
        ({"a": {}, "b": 1.0}, {"a": None, "b": 1.0}),
        ({"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}),
    ],
)
def test_what_differs_is_told_apart_whichever_came_first(one: Any, other: Any) -> None:
    for _ in range(2):
        assert flatten(one).structure.schema != flatten(other).structure.schema


def test_keys_that_are_equal_in_python_but_not_alike() -> None:
    flatten({1: 1.0})
    with pytest.raises(CannotFlatten, match="float"):
        flatten({1.0: 1.0})
    assert flatten({True: 1.0}).structure.schema == flatten({1: 1.0}).structure.schema


def test_dtypes_are_kept_on_request() -> None:
    stats = {"a": torch.tensor(1.0), "b": torch.tensor(1, dtype=torch.int64), "c": 2.0, "d": torch.tensor(1.0).half()}
    found = [leaf.dtypes for leaf in leaf_nodes(flatten(stats, keep_dtypes=True).structure.schema)]
    assert found == [("float32",), ("default",), ("default",), ("float16",)]
    other = {**stats, "a": torch.tensor(1.0).double()}
    assert next(leaf_nodes(flatten(other, keep_dtypes=True).structure.schema)) == Leaf("mean", ("float64",))


def test_depth() -> None:
    deep: Any = 1.0
    for _ in range(MAX_DEPTH):
        deep = {"k": deep}
    flat = flatten(deep)
    assert builder(flat.structure.schema)(iter(flat.leaves)) == deep
    with pytest.raises(CannotFlatten, match="more than 100 deep"):
        flatten([deep])
    loop: dict[str, Any] = {"a": [1.0]}
    loop["a"].append(loop)
    with pytest.raises(CannotFlatten, match="contains itself"):
        flatten(loop)
    shared = [1.0]
    assert flatten({"a": shared, "b": shared}).leaves == [1.0, 1.0]


def test_a_dict_subclass_with_a_default_is_not_filled() -> None:
    stats: defaultdict[str, float] = defaultdict(float, a=1.0)
    flatten(stats)
    assert list(stats) == ["a"]


def test_one_copy_for_all_tensors_brings_back_values_shapes_and_markers() -> None:
    """The grouping by dtype, the single vector and its cutting, on host tensors; streams need a GPU."""
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3), torch.tensor(True), torch.tensor([[4.0]]).double()]
    leaves = [tensors[0], Mean(tensors[1], tensors[2]), Max(tensors[3]), 5.0, None]
    back, weight = HostCopy(tensors).wait(leaves, tensors[0])
    assert back[0].tolist() == [1.0, 2.0]
    assert (back[1].value.item(), back[1].weight.item()) == (3.0, 1.0)
    assert back[2].value.tolist() == [[4.0]]
    assert back[3:] == [5.0, None]
    assert weight.dtype == torch.float64
    assert HostCopy.start_if_needed(leaves, 1.0) is None


def test_prepared_never_raises() -> None:
    class Hostile:
        def __float__(self) -> float:
            raise RuntimeError("not today")

    for stats, weight in (({"a": Hostile()}, 1), ({"a": object()}, 1), ({(): 1}, 1), ({"a": 1}, -1), ({"a": 1}, "w")):
        part = Prepared(stats, weight).part()
        assert isinstance(part, Failure), part
    part = Prepared({"a": 10**400}, 1).part()
    assert isinstance(part, Failure)
    assert part.path == "a"
    assert isinstance(Prepared({"a": 1}, 1).part(), Part)


@pytest.mark.parametrize(
    "other",
    [
        {"a": 1.0, "b": torch.tensor(2.0)},
        {"b": 1.0, "a": 2.0},
        {"a": 1.0, "b": None},
        {1: 1.0, 2: 2.0},
        {"a": 1.0, "b": {"c": 2.0}},
    ],
    ids=repr,
)
def test_a_dict_as_long_as_the_last_one_is_still_looked_at(other: Any) -> None:
    flatten({"a": 1.0, "b": 2.0})
    flat = flatten(other)
    rebuilt = builder(flat.structure.schema)(iter(flat.leaves))
    assert list(map(repr, rebuilt.items())) == list(map(repr, other.items()))


def test_int_keys_are_not_taken_for_the_keys_and_types_that_stand_for_them() -> None:
    flatten({1: 1.0, 2: 2.0})
    with pytest.raises(CannotFlatten):
        flatten({(1, 2): 1.0, (int, int): 2.0})
