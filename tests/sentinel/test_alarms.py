"""Log lines have the fields that are documented, and values reach the other ranks as they are, infinite or not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddpstats._ranks.gather import decode, encode
from ddpstats.sentinel.matmul import MatmulChecksum, MatmulFault, fault_tree
from ddpstats.sentinel.thresholds import (
    ERROR,
    NORMAL,
    WARNING,
    Check,
    alarm_tree,
    log_lines,
    read_settings,
    threshold_finding,
)
from ddpstats.sentinel.verdict import Exam

PREFIX = "[rank 2] [blocks.0.norm] "
V3 = Check(2, "blocks.0.norm", 5, 1, ERROR, 3.5e7, {"pre": 1.25e-5, "avg": 2e-05, "normal": 40.0, "checks": 55.0})
V3_REST = (
    "value [3.5e+07], previous value [1.25e-05], history avg [2e-05], bp time [step 5, micro-batch 1], "
    "normal count [40]."
)


def test_lines_of_v3_have_the_fields_of_the_host_detector() -> None:
    own = read_settings(2, "v3", None, None, {})[0]
    named = "param name [blocks.0.norm]"
    assert log_lines(V3, own) == [f"{PREFIX}A grad-norm spike may happen: {named}, abnormal {V3_REST}"]
    suspect = f"{PREFIX}A value is suspect, and not learnt from: {named}, {V3_REST}"
    assert log_lines(replace(V3, level=WARNING), own) == [suspect]
    assert log_lines(replace(V3, level=NORMAL), own) == [
        f"{PREFIX}A value is normal: {named}, {V3_REST}",
        f"{PREFIX}upper_thresh1 = [1e+06], upper_thresh2 = [100], min_steps = [10], mode = [2]",
    ]


VALUES = pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.1, 1e-45])


@VALUES
def test_an_alarm_arrives_with_its_value_whatever_that_is(value: float) -> None:
    check = Check(2, "blocks.0.norm", 5, 0, ERROR, value, {"pre": value, "min": 0.5, "checks": 7.0})
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
    report = {"fault": decode(encode(fault_tree([fault], 1))), "unchecked": ""}
    exam = Exam(3, lambda tree, what: {}, is_suspected=True, evidence={0: report, 1: None})
    (found,) = MatmulChecksum(0).findings(exam)
    assert repr(found.value) == repr(value)
    assert (found.culprit_ranks, found.name) == ((0,), "mm")
    assert f"element [1, 2] is {value:g} instead of 0.5" in found.text
