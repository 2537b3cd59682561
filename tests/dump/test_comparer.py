"""The rows of two entries: what is compared, what only one side has, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.dump.compare._comparer import EntryComparer
from ddpstats.dump.compare._rows import Mode, Row
from ddpstats.dump.format._entries import DumpEntry
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
def test_statistics_of_one_side_only(a: Any, b: Any, result: str, message: str) -> None:
    row = of_inputs(a, b)
    assert (row.unequal, row.result, row.message) == (True, result, message)


def test_what_only_our_dumps_have_is_no_difference() -> None:
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
def test_what_is_no_number_makes_a_row_unequal(more: dict[str, Any], message: str) -> None:
    row = of_inputs(tensor(1.0, 2.0, **{"first_bad": [0], **more}), tensor(1.0, 2.0, first_bad=[0], md5="0"))
    assert (row.unequal, row.failed, row.message) == (True, False, message)


@pytest.mark.parametrize(("mode", "result"), [("statistics", "Warning"), ("md5", "Different"), ("tensor", "No")])
@pytest.mark.parametrize("extra", [plain("int", 3), None, plain("slice", [None, 1])])
def test_arguments_of_one_side_only(extra: Any, mode: Mode, result: str) -> None:
    (row,) = rows(forward(), {**forward(), "input_kwargs": {"dim": extra}}, mode)
    assert (row.unequal, row.result, row.message) == (True, result, "only B has this argument")
    assert rows(forward([None]), forward([None]), mode)[0].failed is False


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (plain("slice", [None, 3, None]), plain("slice", [None, 4, None])),
        (plain("torch.dtype", "torch.float16"), plain("torch.dtype", "torch.bfloat16")),
        (plain("torch.Size", [2, 3]), plain("torch.Size", [3, 2])),
        (plain("ellipsis", "..."), plain("int", 0)),
        (None, plain("int", 0)),
        ({"type": "MyClass"}, None),
        (plain("float", None), plain("float", 0.5)),
        (plain("float", "abc"), plain("float", 0.5)),
        (plain("float", "nan"), plain("float", 0.5)),
    ],
)
def test_arguments_that_differ(a: Any, b: Any) -> None:
    row = of_inputs(a, b)
    assert (row.unequal, row.result, " in A and " in row.message) == (True, "Warning", True)


def test_arguments_that_do_not_differ() -> None:
    for a, b in ((plain("float", "nan"), plain("float", float("nan"))), (plain("slice", [1]), plain("slice", [1]))):
        assert not of_inputs(a, b).unequal
    assert rows(forward([plain("torch.device", "cuda:0")]), forward([plain("torch.device", "cpu")])) == []


def test_parameters_come_before_the_output() -> None:
    entry = forward([tensor(1.0)], [tensor(2.0)], parameters={"weight": tensor(3.0)})
    entry["input_kwargs"] = {"mask": tensor(1.0)}
    found = rows(entry, entry)
    assert [row.path for row in found] == ["input.0", "input_kwargs.mask", "parameters.weight", "output.0"]
    assert [row.place for row in found] == [0, 1, 2, 3]


def test_a_tensor_that_neither_side_saved_is_compared_by_statistics() -> None:
    for change, result, word in ((1.0, "", "equal"), (1.1, "", "unequal"), (9.0, "Warning", "over the tolerance")):
        row = of_inputs(tensor(change), tensor(1.0), "tensor")
        assert (row.result, row.message, row.by_statistics) == (result, f"neither saved it; statistics {word}", True)
    row = of_inputs(tensor(1.0, data_name="a.pt"), tensor(1.0), "tensor")
    assert (row.result, row.message, row.by_statistics) == ("N/A", "B has not saved this tensor", False)


def test_a_tensor_without_a_checksum_is_not_compared() -> None:
    assert of_inputs(tensor(1.0), tensor(1.0), "md5").message == "both have no md5 of this tensor"
    assert of_inputs(tensor(1.0, md5="0"), tensor(1.0), "md5").message == "B has no md5 of this tensor"


def test_a_mean_near_zero_is_said() -> None:
    a, b = ({**tensor(-1.0, 1.0), "Mean": mean} for mean in (3e-9, 1e-9))
    assert (of_inputs(a, b).result, of_inputs(a, b).message) == ("Warning", "only the mean, which is near 0")
    a, b = ({**tensor(-1.0, 1.0), "Mean": mean} for mean in (0.9, 0.1))
    assert (of_inputs(a, b).result, of_inputs(a, b).message) == ("Warning", "")
