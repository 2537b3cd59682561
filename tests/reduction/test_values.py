"""`reduce_stats` takes real numbers of every library as leaves and weights, and refuses what is no number."""

from __future__ import annotations

import datetime
import decimal
import fractions
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ddpstats import Mean, reduce_stats
from ddpstats.errors import InvalidStats
from ddpstats.testing import ThreadGroup, run_threads
from tests import programs

# -- no numbers -------------------------------------------------------------------------------------------------------

HOUR = datetime.timedelta(hours=1)


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no number")


def _jagged_nested_tensor() -> torch.Tensor:
    """Make the one value that takes seconds: torch imports dynamo for it. All others are made at import."""
    return torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)


def _strided_nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(1)])


# A value of each kind, and words of the message.
NO_NUMBERS: dict[str, tuple[Any, str]] = {
    "timedelta64": (np.timedelta64(3, "s"), "dtype timedelta64[s], which is not a number"),
    "masked array": (np.ma.array([3.0, 4.0]), "which is not a number"),
    "timedelta": (HOUR, "datetime.timedelta is not a leaf"),
    "timedelta in an array": (np.array([HOUR], dtype=object), "of type timedelta"),
    "str": ("3", "str is not a leaf"),
    "array of text": (np.array(["3.5"]), "which is not a number"),
    "None in an array": (np.array([None]), "of type NoneType"),
    "record": (np.array([(1.0,)], dtype=[("a", "f8")]), "which is not a number"),
    "complex128": (np.complex128(1j), "dtype complex128, which is not a number"),
    "complex in an array of objects": (np.array([1j], dtype=object), "complex; log its real part"),
    "a longdouble beyond": (np.longdouble("1e400"), "too large for a float64"),
    "Decimal beyond": (decimal.Decimal("1e400"), "Decimal('1E+400'), which is too large for a float64"),
    "int beyond": (10**400, "too large"),
    "complex tensor": (torch.tensor(1j), "a complex tensor"),
    "nested tensor": (_jagged_nested_tensor, "a nested or quantized tensor"),
    "strided nested tensor": (_strided_nested_tensor(), "a nested or quantized tensor"),
    "meta tensor": (torch.empty(1, device="meta"), "meta"),
    "two dimensions": (np.ones((2, 2)), "an array of shape (2, 2)"),
    "hostile": (Hostile(), "the value is no number"),
    "weight of a duration": (Mean(1.0, np.timedelta64(3, "ns")), "a Mean for which the weight is of type timedelta64"),
        "negative weight": (Mean(1.0, torch.tensor([-1.0, 2.0])), "a Mean for which the weight is tensor"),
}  # fmt: skip


def refusal(group: ThreadGroup, case: str) -> str:
    value = NO_NUMBERS[case][0]
    if value is _jagged_nested_tensor:
        value = _jagged_nested_tensor()
    stats = {"fine": 1.0, "deep": [0.0, {"x": value if group.rank == 1 else 1.0}]}
    with group.reducer(timeout_sec=60) as reducer:
        with pytest.raises(InvalidStats) as caught:
            reducer(stats, 2.0)
        assert (caught.value.path, caught.value.ranks) == ("deep[1]/x", (1,))
        assert reducer({"fine": 4.0}).values == {"fine": 4.0}
    return str(caught.value)


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_what_is_no_number_is_refused_on_every_rank(case: str) -> None:
    text, same_text = run_threads(refusal, 2, case).values()
    assert text == same_text
    assert text.split("\n")[1].startswith("  rank 1 at 'deep[1]/x': ")
    assert NO_NUMBERS[case][1] in text


# 1-d values of the length of a 1-d weight.
NO_VECTORS = {
    "timedelta64": (np.array([3, 4], "m8[ns]"), "which is not a number"),
    "timedelta64 as objects": (np.array([np.timedelta64(3, "ns"), 1.0], dtype=object), "not a number"),
    "None": (np.array([1.0, None]), "of type NoneType"),
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
    ("value", "want"),
    [
        (decimal.Decimal("1.5"), 1.5),
        (fractions.Fraction(1, 4), 0.25),
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


@pytest.mark.slow
def test_stats_are_reduced_without_numpy() -> None:
    ended = programs.run(["-c", WITHOUT_NUMPY], fresh=True)
    assert ended.stdout.strip() == "{'x': 1.0, 'y': None, 'z': 3.0} None", ended.stderr
