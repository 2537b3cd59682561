"""`ddpstats compare` compares two entries value by value; a value that one side lacks is a difference."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.dump.compare._comparer import EntryComparer
from ddpstats.dump.compare._rows import Mode, Row
from ddpstats.dump.reader import DumpEntry
from tests.dump.hand_made import forward, tensor


def rows(a: dict[str, Any], b: dict[str, Any], mode: Mode = "statistics", tolerance: float = 0.5) -> list[Row]:
    return EntryComparer(mode, tolerance).rows(0, DumpEntry("x", a), DumpEntry("x", b))


def of_inputs(a: Any, b: Any, mode: Mode = "statistics") -> Row:
    (row,) = rows(forward([a]), forward([b]), mode)
    return row


def plain(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "value": value}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in tensor(1.0, 2.0).items() if key not in keys}


@pytest.mark.parametrize(
    ("a", "b", "result", "message"),
    [
        (tensor(1.0, 2.0), without("Norm"), "", "B has no Norm"),
        ({**tensor(1.0, 2.0), "Max": None, "Min": None}, tensor(1.0, 2.0), "", "A has no Max, Min"),
        (without("Max", "Min", "Mean", "Norm"), tensor(1.0, 2.0), "N/A", "A has no Max, Min, Mean, Norm"),
    ],
)
def test_statistic_of_one_side_only_is_unequal(a: Any, b: Any, result: str, message: str) -> None:
    row = of_inputs(a, b)
    assert (row.unequal, row.result, row.message) == (True, result, message)


def test_field_that_only_our_dumps_have_is_no_difference() -> None:
    assert not of_inputs(tensor(1.0, nan_count=0, inf_count=0, first_bad=None, md5="1"), tensor(1.0)).unequal
    assert not of_inputs(without("Mean", "Norm"), without("Mean", "Norm")).unequal


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"requires_grad": True}, "requires_grad is True in A and False in B"),
        ({"first_bad": [1]}, "first_bad is [1] in A and [0] in B"),
        ({"md5": "1"}, "the checksums differ"),
    ],
)
def test_difference_outside_the_statistics_makes_a_row_unequal(more: dict[str, Any], message: str) -> None:
    row = of_inputs(tensor(1.0, 2.0, **{"first_bad": [0], **more}), tensor(1.0, 2.0, first_bad=[0], md5="0"))
    assert (row.unequal, row.failed, row.message) == (True, False, message)


@pytest.mark.parametrize(("mode", "result"), [("statistics", "Warning"), ("md5", "Different"), ("tensor", "No")])
@pytest.mark.parametrize("extra", [plain("int", 3), None, plain("slice", [None, 1])])
def test_argument_of_one_side_only_fails(extra: Any, mode: Mode, result: str) -> None:
    (row,) = rows(forward(), {**forward(), "input_kwargs": {"dim": extra}}, mode)
    assert (row.unequal, row.result, row.message) == (True, result, "only B has this argument")
    assert rows(forward([None]), forward([None]), mode)[0].failed is False


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
    ],
)
def test_different_arguments_fail(a: Any, b: Any) -> None:
    row = of_inputs(a, b)
    assert (row.unequal, row.result, " in A and " in row.message) == (True, "Warning", True)


def test_equal_arguments_and_devices_do_not_fail() -> None:
    for a, b in ((plain("float", "nan"), plain("float", float("nan"))), (plain("slice", [1]), plain("slice", [1]))):
        assert not of_inputs(a, b).unequal
    assert rows(forward([plain("torch.device", "cuda:0")]), forward([plain("torch.device", "cpu")])) == []


def test_tensor_that_neither_side_saved_is_compared_by_statistics() -> None:
    for change, result, word in ((1.0, "", "equal"), (1.1, "", "unequal"), (9.0, "Warning", "over the tolerance")):
        row = of_inputs(tensor(change), tensor(1.0), "tensor")
        assert (row.result, row.message, row.by_statistics) == (result, f"neither saved it; statistics {word}", True)
    row = of_inputs(tensor(1.0, data_name="a.pt"), tensor(1.0), "tensor")
    assert (row.result, row.message, row.by_statistics) == ("N/A", "B has not saved this tensor", False)


def test_mean_near_zero_is_noted() -> None:
    a, b = ({**tensor(-1.0, 1.0), "Mean": mean} for mean in (3e-9, 1e-9))
    assert (of_inputs(a, b).result, of_inputs(a, b).message) == ("Warning", "only the mean, which is near 0")
    a, b = ({**tensor(-1.0, 1.0), "Mean": mean} for mean in (0.9, 0.1))
    assert (of_inputs(a, b).result, of_inputs(a, b).message) == ("Warning", "")
