"""Leaves and weights that are no plain numbers: what is masked is absent, and what is no number is refused."""

from __future__ import annotations

import datetime
import decimal
import fractions
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsReducer, Sum, recursive_average, reduce_stats
from ddpstats._reduction.values import _taken
from ddpstats.errors import InvalidStats
from ddpstats.testing import PerRank, RankPool

ma = np.ma


def told(stats: Any, weight: Any = 1.0) -> tuple[Any, ...]:
    reduced = reduce_stats(stats, weight)
    return reduced.values, reduced.weights, reduced.present_ranks, reduced.nonfinite_ranks


# -- masked values ----------------------------------------------------------------------------------------------------

MASKED: dict[str, Any] = {
    "the constant": ma.masked,
    "0-d": ma.array(7.0, mask=True),
    "1 element": ma.array([7.0], mask=[True]),
    "1 element of two dimensions": ma.array([[7.0]], mask=True),
    "int": ma.array(7, mask=True),
    "hard mask": ma.array([7.0], mask=True, hard_mask=True),
    "nan below": ma.array([np.nan], mask=True),
    "objects": ma.array([None], mask=True, dtype=object),
    "an item": ma.array([1.0, 7.0], mask=[False, True])[1],
    "a mean of nothing": ma.array([1.0, 7.0], mask=True).mean(),
    "masked_invalid": ma.masked_invalid(np.array(np.inf)),
    "all of many": ma.array([1.0, 7.0], mask=True),
    "Mean": Mean(ma.masked, 3.0),
    "Sum": Sum(ma.array(7.0, mask=True)),
    "Min": Min(ma.masked),
    "Max": Max(ma.array([7.0, 8.0], mask=True)),
    "Any": AnyFlag(ma.array(True, mask=True)),
    "All": All(ma.array([False], mask=True)),
}


@pytest.mark.parametrize("case", MASKED)
def test_a_masked_value_is_absent(two_ranks: RankPool, case: str) -> None:
    value = MASKED[case]
    other = type(value)(1) if isinstance(value, Mean | Sum | Min | Max | AnyFlag | All) else 2.0
    for stats in ({"x": value, "y": 1.0}, {"x": value, "y": np.float32(1.0)}):
        found = two_ranks.run(told, PerRank([stats, {"x": other, "y": 3.0}]), 4.0).values()
        assert found[0] == found[1]
        want = two_ranks.run(told, PerRank([{"x": None, "y": 1.0}, {"x": other, "y": 3.0}]), 4.0).values()
        assert found[0] == want[0]
        assert found[0][2:] == ({"x": 1, "y": 2}, {"x": 0, "y": 0})
    everywhere = two_ranks.run(told, {"x": value, "y": 1.0}).values()
    assert everywhere[0] == ({"x": None, "y": 1.0}, {"x": 0, "y": 2}, {"x": 0, "y": 2}, {"x": 0, "y": 0})


def in_turn(values: list[Any]) -> list[Any]:
    """One type, one key: what is masked now was a number before."""
    with StatsReducer(name="in turn") as reducer:
        found = [reducer({"x": value, "y": 1.0}, 2.0) for value in values]
        return [(reduced.values["x"], reduced.present_ranks["x"]) for reduced in found]


def test_values_that_are_masked_now_and_then(two_ranks: RankPool) -> None:
    held = [ma.array(3.0), ma.array(7.0, mask=True), ma.array([5.0]), ma.array([7.0], mask=True), ma.array(1.0)]
    want = [(3.0, 2), (None, 0), (5.0, 2), (None, 0), (1.0, 2)]
    assert two_ranks.run(in_turn, held).values() == [want, want]
    marked = [Mean(value, 1.0) for value in held]
    assert two_ranks.run(in_turn, marked).values() == [want, want]


def test_a_value_that_is_not_masked_counts(two_ranks: RankPool) -> None:
    for value in (ma.array(7.0), ma.array([7.0]), ma.array([7.0], mask=[False]), ma.array(7), ma.array([[7.0]])):
        assert two_ranks.run(told, {"x": value}).values()[1] == ({"x": 7.0}, {"x": 2.0}, {"x": 2}, {"x": 0})


def test_masked_entries_have_weight_zero(two_ranks: RankPool) -> None:
    first = ma.array([1.0, np.nan, 3.0], mask=[False, True, False])
    second = ma.array([5.0, 100.0], mask=[False, True])
    weights = PerRank([torch.tensor([1.0, 10.0, 3.0]), np.array([2.0, 7.0])])
    found = two_ranks.run(told, PerRank([{"x": first, "s": 1.0}, {"x": second, "s": 1.0}]), weights).values()
    assert (
        found[0]
        == found[1]
        == ({"x": (1 + 9 + 10) / 6, "s": 1.0}, {"x": 6, "s": 23}, {"x": 2, "s": 2}, {"x": 0, "s": 0})
    )
    whole = ma.array([1.0, 3.0])
    assert two_ranks.run(told, {"x": whole}, torch.ones(2)).values()[0][:2] == ({"x": 2.0}, {"x": 4.0})
    objects: Any = ma.array([1.0, None], mask=[False, True], dtype=object)
    assert two_ranks.run(told, {"x": objects}, torch.ones(2)).values()[0][:2] == ({"x": 1.0}, {"x": 2.0})


@pytest.mark.parametrize(("op", "want"), [(Sum, 8.0), (Min, 1.0), (Max, 3.0)])
def test_other_ops_do_not_see_masked_entries(two_ranks: RankPool, op: Any, want: float) -> None:
    assert two_ranks.run(told, {"x": op(ma.array([1.0, 99.0, 3.0], mask=[False, True, False]))}).values()[0][0] == {
        "x": want
    }


def test_flags_do_not_see_masked_entries(two_ranks: RankPool) -> None:
    flags = ma.array([True, False], mask=[False, True])
    assert two_ranks.run(told, {"x": All(flags), "y": AnyFlag(~flags)}).values()[0][0] == {"x": True, "y": False}


def test_masked_entries_of_a_weight_are_zero(two_ranks: RankPool) -> None:
    weight = ma.array([1.0, 9.0], mask=[False, True])
    found = two_ranks.run(told, {"x": torch.tensor([5.0, 6.0]), "s": 2.0}, weight).values()[0]
    assert found[:2] == ({"x": 5.0, "s": 2.0}, {"x": 2.0, "s": 2.0})


def averaged(obj: Any) -> Any:
    return recursive_average(obj, torch.tensor([2.0]), True)[0]


def test_recursive_average_leaves_masked_values_out(two_ranks: RankPool) -> None:
    found = two_ranks.run(averaged, PerRank([{"x": ma.masked}, {"x": torch.tensor([3.0])}])).values()
    assert found[0] == found[1] == {"x": torch.tensor(3.0)}
    assert two_ranks.run(averaged, {"x": ma.array([7.0], mask=True)}).values() == [{"x": None}] * 2


def test_masked_arrays_are_taken_when_the_reduction_starts() -> None:
    value = ma.array([7.0, 8.0], mask=[False, True])
    taken = _taken(value)
    value[:] = 0.0
    assert (taken.tolist(), type(taken)) == ([7.0, None], type(value))


# -- no numbers -------------------------------------------------------------------------------------------------------

HOUR = datetime.timedelta(hours=1)
DAY = datetime.datetime(2020, 1, 1)
RECORD = np.array([(1.0,)], dtype=[("a", "f8")])

# A value of each kind, and words of the message.
NO_NUMBERS: dict[str, tuple[Any, str]] = {
    "timedelta64": (np.timedelta64(3, "s"), "a duration (timedelta64[s]); log a number of a unit"),
    "timedelta64 of nanoseconds": (np.timedelta64(3, "ns"), "a duration (timedelta64[ns])"),
    "timedelta64 of months": (np.timedelta64(3, "M"), "a duration"),
    "timedelta64 0-d": (np.array(3, "m8[ns]"), "a duration"),
    "timedelta64 1 element": (np.array([3], "m8[ns]"), "a duration"),
    "no time": (np.timedelta64("NaT"), "a duration"),
    "datetime64": (np.datetime64(5, "ns"), "a point in time (datetime64[ns]); log a number"),
    "datetime64 of days": (np.datetime64("2020-01-01"), "a point in time (datetime64[D])"),
    "datetime64 1 element": (np.array([5], "M8[ns]"), "a point in time"),
    "masked timedelta64": (ma.array([3], "m8[ns]"), "a duration"),
    "timedelta": (HOUR, "datetime.timedelta is not a leaf; pass a number, such as its .total_seconds()"),
    "datetime": (DAY, "datetime.datetime is not a leaf"),
    "date": (DAY.date(), "datetime.date is not a leaf"),
    "timedelta in an array": (np.array([HOUR], dtype=object), "of type timedelta"),
    "timedelta64 in an array of objects": (np.array([np.timedelta64(3, "ns")], dtype=object), "a duration"),
    "str": ("3", "str is not a leaf"),
    "str_": (np.str_("3"), "of type str, which is not a number"),
    "bytes_": (np.bytes_(b"3"), "of type bytes"),
    "array of text": (np.array(["3.5"]), "of type str"),
    "text in an array of objects": (np.array(["3.5"], dtype=object), "of type str"),
    "None in an array": (np.array([None]), "of type NoneType"),
    "record": (RECORD, "a record or raw bytes"),
    "an item of a record array": (RECORD[0], "a record or raw bytes"),
    "recarray": (RECORD.view(np.recarray), "a record or raw bytes"),
    "masked record": (ma.array((1.0,), dtype=[("a", "f8")]), "a record or raw bytes"),
    "void": (np.void(b"abcd"), "a record or raw bytes (|V4)"),
    "complex128": (np.complex128(1j), "complex; log its real part"),
    "clongdouble": (np.clongdouble(1 + 1j), "complex; log its real part"),
    "complex in an array of objects": (np.array([1j], dtype=object), "complex; log its real part"),
    "a longdouble beyond": (np.longdouble("1e400"), "too large for a float64"),
    "Decimal beyond": (decimal.Decimal("1e400"), "Decimal('1E+400'), which is too large for a float64"),
    "Fraction beyond": (fractions.Fraction(10**400), "too large for a float"),
    "int beyond": (10**400, "too large"),
    "complex tensor": (torch.tensor(1j), "a complex tensor"),
    "nested tensor": (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "a nested tensor"),
    "meta tensor": (torch.empty(1, device="meta"), "meta"),
    "two dimensions": (np.ones((2, 2)), "an array of shape (2, 2)"),
    "two dimensions, all masked": (ma.array(np.ones((2, 2)), mask=True), "an array of shape (2, 2)"),
    "Sum of a duration": (Sum(np.timedelta64(3, "s")), "a duration"),
    "Any of text": (AnyFlag(np.str_("1")), "of type str"),
    "weight of a duration": (Mean(1.0, np.timedelta64(3, "ns")), "a Mean for which the weight is a duration"),
    "masked weight": (Mean(1.0, ma.masked), "a Mean for which the weight is masked"),
    "text for a weight": (Mean(1.0, np.str_("3")), "a Mean for which the weight is of type str"),
}  # fmt: skip


def refused(case: str, bad_rank: int, rank: int) -> tuple[str, Any]:
    stats = {"fine": 1.0, "deep": [0.0, {"x": NO_NUMBERS[case][0] if rank == bad_rank else 1.0}]}
    with StatsReducer(name="refused") as reducer:
        with pytest.raises(InvalidStats) as caught:
            reducer(stats, 2.0)
        assert (caught.value.path, caught.value.ranks) == ("deep[1]/x", (bad_rank,))
        return str(caught.value), reducer({"fine": 4.0}).values


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_what_is_no_number_is_refused_on_every_rank(two_ranks: RankPool, case: str) -> None:
    found = two_ranks.run(refused, case, 1, PerRank([0, 1])).values()
    assert found[0] == found[1]
    text, after = found[0]
    assert text.split("\n")[1].startswith("  rank 1 at 'deep[1]/x': ")
    assert NO_NUMBERS[case][1] in text
    assert after == {"fine": 4.0}


# 1-d values of the length of a 1-d weight.
NO_VECTORS = {
    "timedelta64": (np.array([3, 4], "m8[ns]"), "a duration"),
    "datetime64": (np.array([3, 4], "M8[ns]"), "a point in time"),
    "text": (np.array(["1", "2"]), "of type str"),
    "bytes": (np.array([b"1", b"2"]), "of type bytes"),
    "text as objects": (np.array(["1", "2"], dtype=object), "of type str"),
    "timedelta64 as objects": (np.array([np.timedelta64(3, "ns"), 1.0], dtype=object), "a duration"),
    "None": (np.array([1.0, None]), "of type NoneType"),
    "complex": (np.array([1j, 2.0]), "complex"),
    "records": (np.zeros(2, dtype=[("a", "f8")]), "a record"),
    "complex tensor": (torch.tensor([1j, 2.0]), "a complex tensor"),
}


@pytest.mark.parametrize("case", NO_VECTORS)
def test_vectors_of_no_numbers_are_refused_as_values_and_as_weights(case: str) -> None:
    value, words = NO_VECTORS[case]
    with pytest.raises(InvalidStats) as caught:
        reduce_stats({"a": {"x": value}}, torch.ones(2))
    assert caught.value.path == "a/x"
    assert words in str(caught.value)
    with pytest.raises(InvalidStats, match="the weight is"):
        reduce_stats({"x": 1.0}, value)


@pytest.mark.parametrize(
    "weight",
    [ma.masked, ma.array(3.0, mask=True), np.timedelta64(3, "ns"), np.array(3, "m8[ns]"), np.str_("3"), RECORD],
)
def test_what_cannot_be_a_weight(weight: Any) -> None:
    with pytest.raises(InvalidStats, match=r"the weight is .*; it is a real number or a 1-d tensor"):
        reduce_stats({"x": 1.0}, weight)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (decimal.Decimal("1.5"), 1.5),
        (fractions.Fraction(1, 4), 0.25),
        (np.longdouble(2), 2.0),
        (np.array([3.5], dtype=object), 3.5),
        (np.array([fractions.Fraction(1, 4)], dtype=object), 0.25),
        (np.bool_(True), 1.0),
        (np.uint64(2**63), 2.0**63),
        (np.array([1.0, 2.0]).view(np.recarray)[1:], 2.0),
        (torch.tensor([3.0]).to_sparse(), 3.0),
        (torch.tensor([1.5]).to(torch.float8_e4m3fn), 1.5),
        (torch._neg_view(torch.tensor([3.0])), -3.0),
        (decimal.Decimal("-Infinity"), -np.inf),
    ],
)
def test_numbers_of_other_kinds_count(value: Any, want: float) -> None:
    assert reduce_stats({"x": value}, 2.0).values == {"x": want}


def test_vectors_of_other_kinds_count() -> None:
    for value in (
        np.array([1.0, 3.0], dtype=object),
        np.array([1, 3], dtype=np.longdouble),
        np.array([decimal.Decimal(1), fractions.Fraction(3)]),
        torch.tensor([1.0, 3.0]).to_sparse(),
        torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn),
    ):
        assert reduce_stats({"x": value}, torch.ones(2)).values == {"x": 2.0}


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.simplefilter("ignore")
import ddpstats
print(ddpstats.reduce_stats({"x": 1.0, "y": None, "z": ddpstats.Max(3)}, 2.0).values, sys.modules["numpy"])
"""


def test_without_numpy() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.strip() == "{'x': 1.0, 'y': None, 'z': 3.0} None", ran.stderr
