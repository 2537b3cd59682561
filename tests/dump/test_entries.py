"""An entry of a dump gives its tensors by path, and refuses fields that cannot be used."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpstats.dump.analyze import DumpEntry, DumpLeaf
from ddpstats.errors import DumpError
from tests.dump.hand_made import backward, forward, tensor


def paths(entry: DumpEntry) -> dict[str, list[str]]:
    walks = {"inputs": entry.inputs, "outputs": entry.outputs, "leaves": entry.leaves(), "values": entry.values()}
    return {which: [path for path, _ in statistic] for which, statistic in walks.items()}


def test_tensors_of_a_forward_entry_are_found_by_path() -> None:
    leaf = tensor(1.0)
    raw = forward(leaf, [leaf, {"a": leaf}], {"type": "int", "value": 3}, None, out=[leaf, None])
    raw["input_kwargs"] = {"mask": leaf, "type": leaf, "p": {"type": "float", "value": 0.1}}
    raw["parameters"] = {"weight": leaf, "sub.bias": leaf}
    assert paths(DumpEntry("x", raw)) == {
        "inputs": ["input.0", "input.1.0", "input.1.1.a", "input_kwargs.mask", "input_kwargs.type"],
        "outputs": ["output.0"],
        "leaves": [
            *("input.0", "input.1.0", "input.1.1.a", "input_kwargs.mask", "input_kwargs.type", "output.0"),
            *("parameters.weight", "parameters.sub.bias"),
        ],
        "values": [
            *("input.0", "input.1.0", "input.1.1.a", "input.2", "input_kwargs.mask", "input_kwargs.type"),
            *("input_kwargs.p", "output.0", "parameters.weight", "parameters.sub.bias"),
        ],
    }


def test_paths_in_backward_entries_and_gradients() -> None:
    leaf = tensor(1.0)
    assert paths(DumpEntry("x", backward(leaf, out=[None, leaf])))["inputs"] == ["input.0"]
    assert paths(DumpEntry("x", backward(leaf, out=[None, leaf])))["outputs"] == ["output.1"]
    assert paths(DumpEntry("x", {"weight": [leaf], "bias": [leaf, leaf]}))["leaves"] == ["weight", "bias.0", "bias.1"]
    assert paths(DumpEntry("x", {"input": None, "output": leaf, "is_recompute": True}))["leaves"] == ["output"]
    assert DumpEntry("x", {"is_recompute": True}).is_recompute


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((1, 1.0), (0.5, 0.5), (True, 1.0), (None, None), ("nan", math.nan), ("NaN", math.nan), ("inf", math.inf)),
        *(("-inf", -math.inf), ("Infinity", math.inf), ("-Infinity", -math.inf), ("N/A", None)),
        pytest.param(10**400, math.inf, id="too large"),
    ],
)
def test_statistic_is_read_in_every_spelling(value: Any, expected: float | None) -> None:
    statistic = DumpLeaf({"type": "torch.Tensor", "Max": value}).max
    assert statistic == pytest.approx(expected, nan_ok=True) if expected is not None else statistic is None


@pytest.mark.parametrize(
    ("leaf", "bad"),
    [
        (tensor(1.0, nan_count=0, inf_count=0), False),
        (tensor(1.0, nan_count=1, inf_count=0), True),
        (tensor(1.0, nan_count=0, inf_count=2), True),
        (tensor(1.0), False),
        (tensor(math.inf, 1.0), True),
        ({**tensor(1.0), "Min": "nan"}, True),
        ({**tensor(1.0), "Max": None, "Min": None, "Norm": None}, False),
    ],
)
def test_leaf_is_finite_by_counts_or_statistics(leaf: dict[str, Any], bad: bool) -> None:
    assert DumpLeaf(leaf).is_finite is not bad


def test_deeply_nested_entry_is_refused() -> None:
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    for held in (nested, {"type": "slice", "value": nested}, {**tensor(1.0), "later": {"a": nested}}):
        with pytest.raises(DumpError, match="nested more than 64 deep"):
            list(DumpEntry("x", forward(held)).values())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("Max", [1], r"Max: \[1\] is not a number"),
        ("shape", [2, -1], "shape is "),
        ("md5", 5, "md5: 5 is not a string"),
        ("data_name", ["a"], "data_name: "),
        ("nan_count", "many", "nan_count: 'many' is not a whole number"),
        ("first_bad", 3, "first_bad: 3 is not a list of whole numbers"),
        ("stream", {}, "stream: {} is not a whole number"),
    ],
)
def test_unusable_field_is_named(field: str, value: Any, words: str) -> None:
    entry = DumpEntry("Torch.add.0.forward", forward({**tensor(1.0), field: value}), "r/dump.json")
    with pytest.raises(DumpError, match=r"r/dump.json: Torch.add.0.forward: input.0: " + words):
        list(entry.leaves())
