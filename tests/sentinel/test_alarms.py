"""What ranks tell each other of values that are not normal."""

from __future__ import annotations

import math

import pytest

from ddpstats._agreement.tree_codec import decode, encode
from ddpstats.sentinel._alarms import alarm_tree, fault_tree, matmul_finding, threshold_finding
from ddpstats.sentinel._lines import Check
from ddpstats.sentinel._matmul_fault import MatmulFault

VALUES = pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.1, 1e-45])


@VALUES
def test_an_alarm_arrives_with_its_value_whatever_that_is(value: float) -> None:
    check = Check(2, "blocks.0.norm", 5, 0, 1, value, {"pre": value, "min": 0.5}, 7)
    found = threshold_finding({0: None, 2: decode(encode(alarm_tree([check])))})
    assert found is not None
    assert repr(found.value) == repr(value)
    assert (found.culprit_ranks, found.name) == ((2,), "blocks.0.norm")
    assert (
        f"rank 2: blocks.0.norm, micro-batch 0: value {value:g} after 7 checks (pre {value:g}, min 0.5)" in found.text
    )


@VALUES
def test_a_wrong_product_arrives_with_its_value_whatever_that_is(value: float) -> None:
    fault = MatmulFault(
        op="mm",
        shape=(2, 3, 4),
        dtype="float32",
        index=(1, 2),
        got=value,
        expected=0.5,
        wrong=1,
        transient=True,
        backward=False,
    )
    found = matmul_finding({0: decode(encode(fault_tree([fault], 1))), 1: None})
    assert found is not None
    assert repr(found.value) == repr(value)
    assert (found.culprit_ranks, found.name) == ((0,), "mm")
    assert f"element [1, 2] is {value:g} instead of 0.5" in found.text
