"""`ddpstats compare` calls two values different by msprobe's rules, and values of n sides by their groups."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ddpstats.dump.analyze import DumpEntry, RankDump
from ddpstats.dump.analyze.compare import (
    NONFINITE,
    CompareMode,
    Comparer,
    LeafRow,
    LeafVerdict,
    PairedEntry,
    Side,
)
from ddpstats.dump.msprobe import GROWTH, difference
from tests.dump.hand_made import forward, tensor

NAN, INF = math.nan, math.inf


def rows(*entries: Any, mode: CompareMode = "statistics", tolerance: float = 0.5) -> list[LeafRow]:
    """Compare entries; of two, the sides are called A and B."""
    labels = ["A", "B"] if len(entries) == 2 else [f"rank {rank}" for rank in range(len(entries))]
    dump = RankDump(Path("dump.json"), None, None, {}, complete=True)
    values = {label: dict(DumpEntry("x", raw).values(nulls=True)) for label, raw in zip(labels, entries, strict=True)}
    sides = {label: Side(label, dump) for label in labels}
    return Comparer(mode, tolerance).rows(sides, PairedEntry(dict.fromkeys(labels, "x"), values))


def of_inputs(a: Any, b: Any, mode: CompareMode = "statistics", tolerance: float = 0.5) -> LeafVerdict:
    (row,) = rows(forward(a), forward(b), mode=mode, tolerance=tolerance)
    return row.verdict


def plain(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "value": value}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in tensor(1.0, 2.0).items() if key not in keys}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (3.0, 2.0, (1.0, 0.5)),
        (0.0, -0.0, (0.0, 0.0)),
        (1.0, 0.0, (1.0, INF)),
        (NAN, NAN, (0.0, 0.0)),
        (NAN, 1.0, (NAN, NAN)),
        (INF, INF, (0.0, 0.0)),
        (-INF, INF, (-INF, INF)),
        (1.0, INF, (-INF, INF)),
        (INF, NAN, (NAN, NAN)),
        (None, 1.0, (None, None)),
    ],
)
def test_difference_and_relative_error_of_two_numbers(a: Any, b: Any, expected: Any) -> None:
    assert difference(a, b) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("a", "tolerance", "result"),
    [(3.0, 0.5, ""), (3.001, 0.5, "Warning"), (NAN, 1e300, "Warning"), (INF, 1e300, "Warning")],
)
def test_relative_error_at_the_tolerance_is_within_it_and_nan_never_is(a: float, tolerance: float, result: str) -> None:
    assert of_inputs({**tensor(2.0), "Max": a}, tensor(2.0), tolerance=tolerance).result == result


def test_statistic_that_one_tool_does_not_record_is_no_difference() -> None:
    whole = tensor(1, 2, dtype="torch.int64")
    theirs = {**whole, "Mean": None, "Norm": None}
    for a, b in ((whole, theirs), (theirs, whole)):
        verdict = of_inputs(a, b)
        assert (verdict.result, verdict.unequal, verdict.compared) == ("", False, "statistics")
    assert of_inputs({**theirs, "Max": 3}, whole).unequal
    assert not of_inputs(tensor(1.0, nan_count=0, inf_count=0, first_bad=None, md5="1"), tensor(1.0)).unequal


def test_tensor_without_any_statistics_on_one_side_cannot_be_compared() -> None:
    nothing = without("Max", "Min", "Mean", "Norm")
    for a, b, side in ((nothing, tensor(1.0, 2.0), "A"), (tensor(1.0, 2.0), nothing, "B")):
        verdict = of_inputs(a, b)
        assert (verdict.result, verdict.message) == ("N/A", f"{side} has no statistics of it")


SPARSE: dict[str, Any] = {"layout": "sparse_coo", "nnz": 2}


@pytest.mark.parametrize(
    ("a", "b", "compared", "unequal"),
    [
        (without("Max", "Min", "Mean", "Norm"), without("Max", "Min", "Mean", "Norm"), "", False),
        ({**without("Max", "Min", "Mean", "Norm"), "shape": [0]},) * 2 + ("statistics", False),
        (tensor(1.0, **SPARSE), tensor(1.0, **SPARSE), "", False),
        (tensor(1.0, md5="1", **SPARSE), tensor(1.0, md5="1", **SPARSE), "", False),
        (tensor(1.0, **SPARSE), tensor(2.0, **SPARSE), "statistics", True),
        (tensor(1.0, **SPARSE), tensor(1.0, **{**SPARSE, "nnz": 3}), "statistics", True),
    ],
)  # fmt: skip
def test_tensors_of_which_too_little_is_known_are_not_equal(a: Any, b: Any, compared: str, unequal: bool) -> None:
    verdict = of_inputs(a, b, mode="md5")
    assert (verdict.compared, verdict.unequal) == (compared, unequal)
    assert bool(verdict.message) == (not compared or "nnz" in verdict.message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"requires_grad": True}, "requires_grad is True in A and False in B"),
        ({"first_bad": [1]}, "first_bad is [1] in A and [0] in B"),
        ({"dtype": "torch.float16"}, "dtype is torch.float16 in A and torch.float32 in B"),
    ],
)
def test_difference_outside_the_statistics_is_unequal_within_the_tolerance(more: dict[str, Any], message: str) -> None:
    verdict = of_inputs(tensor(1.0, 2.0, **{"first_bad": [0], **more}), tensor(1.0, 2.0, first_bad=[0]))
    assert (verdict.unequal, verdict.failed, verdict.message) == (True, False, message)


def test_mean_near_zero_is_noted() -> None:
    a, b = ({**tensor(-1.0, 1.0), "Mean": mean} for mean in (3e-9, 1e-9))
    assert (of_inputs(a, b).result, of_inputs(a, b).message) == ("Warning", "only the mean, which is near 0")
    a, b = ({**tensor(-1.0, 1.0), "Mean": mean} for mean in (0.9, 0.1))
    assert (of_inputs(a, b).result, of_inputs(a, b).message) == ("Warning", "")


def test_part_of_a_tensor_is_not_compared_with_another_part_or_the_whole() -> None:
    half, quarter = (tensor(1.0, shape=[8, 8], local_shape=[rows, 8]) for rows in (4, 2))
    assert of_inputs(half, quarter).message == "the shape is [4, 8] in A and [2, 8] in B"
    assert of_inputs(tensor(1.0, shape=[8, 8]), half).result == "N/A"


@pytest.mark.parametrize("extra", [plain("int", 3), None, plain("slice", [None, 1])])
def test_argument_of_one_side_only_fails(extra: Any) -> None:
    (row,) = rows(forward(), {**forward(), "input_kwargs": {"dim": extra}})
    assert (row.verdict.unequal, row.verdict.result, row.verdict.message) == (True, "N/A", "A lacks this argument")
    assert not of_inputs(None, None).unequal


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (plain("slice", [None, 3, None]), plain("slice", [None, 4, None])),
        (plain("torch.dtype", "torch.float16"), plain("torch.dtype", "torch.bfloat16")),
        (None, plain("int", 0)),
        ({"type": "MyClass"}, None),
        (plain("float", "abc"), plain("float", 0.5)),
        (plain("float", "nan"), plain("float", 0.5)),
        (plain("bool", True), plain("int", 1)),
        (plain("float64", 1.0), plain("float64", 3.0)),
        (plain("Color", 1), plain("Color", 2)),
        (plain("str_", "a"), {"type": "MyClass"}),
    ],
)
def test_different_arguments_fail(a: Any, b: Any) -> None:
    verdict = of_inputs(a, b)
    assert (verdict.unequal, verdict.result, " in A and " in verdict.message) == (True, "Warning", True)


def test_equal_arguments_and_devices_do_not_fail() -> None:
    for a, b in (
        (plain("float", "nan"), plain("float", NAN)),
        (plain("slice", [1]), plain("slice", [1])),
        (plain("int", 1), plain("float", 1.0)),
        (plain("float64", NAN), plain("float64", NAN)),
        (plain("float32", 1.0), plain("int64", 1)),
        (plain("complex64", "(1+2j)"), plain("complex", "(1+2j)")),
        (plain("float64", "nan"), plain("float", NAN)),
        (plain("float32", 1.0), {"type": "float32"}),  # of ddpstats 0.1.0
    ):
        assert not of_inputs(a, b).unequal
    assert rows(forward(plain("torch.device", "cuda:0")), forward(plain("torch.device", "cpu"))) == []


def test_equal_checksums_are_equal_whatever_another_tool_made_of_the_statistics() -> None:
    a, b = tensor(1.0, 2.0, md5="1"), {**tensor(1.0, 2.0, md5="1"), "Mean": 1.50001, "Norm": None}
    verdict = of_inputs(a, b, "md5")
    assert (verdict.compared, verdict.unequal, verdict.result) == ("checksum", False, "Pass")
    verdict = of_inputs(a, {**a, "md5": "2"}, "md5")
    assert (verdict.compared, verdict.unequal, verdict.result) == ("checksum", True, "Different")
    assert of_inputs(a, {**a, "md5": "2"}, "statistics").unequal is False


@pytest.mark.parametrize(
    ("a", "b", "highlight"),
    [
        (forward(tensor(NAN)), forward(tensor(1.0)), [NONFINITE]),
        (forward(tensor(NAN)), forward(tensor(NAN)), [""]),
        (forward(tensor(1.005), out=tensor(1.2)), forward(tensor(1.0), out=tensor(1.0)), ["", GROWTH]),
        (forward(tensor(1.02), out=tensor(1.2)), forward(tensor(1.0), out=tensor(1.0)), ["", ""]),
        (forward(out=tensor(1.2)), forward(out=tensor(1.0)), [""]),
    ],
)
def test_what_is_worth_a_look_is_highlighted(a: Any, b: Any, highlight: list[str]) -> None:
    assert [row.highlight for row in rows(a, b)] == highlight


# -- n sides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "groups", "culprits", "sides"),
    [
        ([1, 1, 1], [[0, 1, 2]], [], (0, 2)),
        ([1, 2, 1], [[1], [0, 2]], [1], (1, 2)),
        ([1, 1, 2, 2], [[0, 1], [2, 3]], [], (0, 3)),
        ([5, 1, 1, 6, 1], [[0], [3], [1, 2, 4]], [0, 3], (0, 4)),
        ([1, 2, 3], [[0], [1], [2]], [], (0, 2)),
    ],
)
def test_sides_with_equal_values_are_a_group_and_the_largest_one_is_the_reference(
    weights: list[float], groups: list[list[int]], culprits: list[int], sides: tuple[int, int]
) -> None:
    (row,) = rows(*(forward(tensor(weight)) for weight in weights))
    assert row.groups == [[f"rank {rank}" for rank in group] for group in groups]
    assert row.culprits == [f"rank {rank}" for rank in culprits]
    assert row.sides == tuple(f"rank {rank}" for rank in sides)
    assert row.verdict.unequal == (len(groups) > 1)
