"""Log lines, against those of CANN's operator, character by character; and what ranks tell each other of values."""

from __future__ import annotations

import math
import re

import pytest

from ddpstats._agreement.tree_codec import decode, encode
from ddpstats.sentinel._alarms import (
    Check,
    alarm_tree,
    error_line,
    fault_tree,
    info_lines,
    matmul_finding,
    threshold_finding,
    warning_line,
)
from ddpstats.sentinel._matmul_checksum import MatmulFault
from ddpstats.sentinel._settings import SentinelSettings, read_settings
from tests.sentinel import mindspore_log

PREFIX = "[rank 2] [blocks.0.norm] "


def settings(mode: int, detector: str = "v2") -> SentinelSettings:
    return read_settings(mode, detector, None, None, {})[0]


def parsed(line: str) -> dict[str, str]:
    """Every ``name = [text]`` of a line, in its order."""
    return dict(re.findall(r"(\w+) = \[([^\]]*)\]", line))


def check_of(line: str, level: int = 1) -> Check:
    """What the operator had before it when it wrote ``line``."""
    fields = parsed(line)
    state = {name: float(fields[f"{name}_val"]) for name in ("pre", "min", "max")}
    return Check(2, "blocks.0.norm", 5, 0, level, float(fields["val"]), state, int(fields["step"]))


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_an_error_line_is_that_of_the_operator_to_the_letter(mode: int) -> None:
    for line in {1: mindspore_log.MODE_1, 2: mindspore_log.MODE_2, 3: mindspore_log.MODE_3}[mode]:
        assert error_line(check_of(line), settings(mode)) == PREFIX + line


def test_info_lines_are_those_of_the_operator_to_the_letter() -> None:
    for line in mindspore_log.MODE_3_NORMAL:
        found = info_lines(check_of(line, level=0), settings(3))
        assert found == (PREFIX + line, PREFIX + mindspore_log.MODE_3_CONSTANTS)


def test_fields_come_in_the_order_of_the_operator_and_can_be_parsed() -> None:
    check = Check(0, "norm", 9, 1, 1, math.inf, {"pre": math.nan, "min": 0.25, "max": 1e7}, 7)
    own = SentinelSettings(1, "v2", (20.0, 10.0), (40.0, 30.5), 8)
    assert parsed(error_line(check, own)) == {
        "val": "inf",
        "pre_val": "nan",
        "min_val": "0.250000",
        "max_val": "10000000.000000",
        "step": "7",
        "c_min_steps": "8",
        "c_thresh_l1": "20.000000",
        "c_coeff_l1": "40.000000",
        "c_thresh_l2": "10.000000",
        "c_coeff_l2": "30.500000",
        "npu_asd_detect": "1",
    }
    assert list(parsed(error_line(check, own))) == list(parsed(mindspore_log.MODE_1[0]))


def test_a_warning_line_has_the_fields_of_an_error_line_and_says_l2() -> None:
    check = check_of(mindspore_log.MODE_2[0], level=2)
    assert warning_line(check, settings(2)) == error_line(check, settings(2)).replace("L1 Error", "L2 Warning")


V3 = Check(2, "blocks.0.norm", 5, 1, 1, 3.5e7, {"pre": 1.25e-5, "avg": 2e-05, "normal": 40.0}, 55)
V3_REST = "previous value [1.25e-05], history avg [2e-05], bp time [step 5, micro-batch 1], normal count [40]."


def test_lines_of_v3_have_the_fields_of_the_host_detector() -> None:
    own = settings(2, "v3")
    named = "param name [blocks.0.norm]"
    alarm = f"A grad-norm spike may happen: {named}, abnormal value [3.5e+07], {V3_REST}"
    assert error_line(V3, own) == PREFIX + alarm
    suspect = f"A value is suspect, and not learnt from: {named}, value [3.5e+07], {V3_REST}"
    assert warning_line(V3, own) == PREFIX + suspect
    assert info_lines(V3, own) == (
        f"{PREFIX}A value is normal: {named}, value [3.5e+07], {V3_REST}",
        f"{PREFIX}upper_thresh1 = [1e+06], upper_thresh2 = [100], min_steps = [10], mode = [2]",
    )


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
