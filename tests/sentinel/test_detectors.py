"""Both detectors compute what their published algorithms do, give the log lines of CANN's operator, and never wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from numpy import float32

from ddpstats._ranks.gather import decode, encode
from ddpstats.sentinel.thresholds import (
    ERROR,
    NORMAL,
    RULES,
    WARNING,
    Check,
    Rule,
    SentinelSettings,
    State,
    alarm_tree,
    log_lines,
    read_settings,
    threshold_finding,
)
from tests.sentinel import mindspore_log

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize("detector", ["v2", "v3"])

# Small enough for every branch to be reached within a few checks
V2_SETTINGS = SentinelSettings(1, "v2", (1000.0, 100.0), (5.0, 2.0), min_steps=4)
V3_SETTINGS = SentinelSettings(1, "v3", (50.0, 4.0), (1.0, 1.0), min_steps=3)

Row = dict[str, float]


def defaults(detector: str) -> SentinelSettings:
    return read_settings(1, detector, None, None, {})[0]


def columns_of(rule: Rule) -> list[str]:
    return ["value", *rule.start, "level"]


def check_one(rule: Rule, value: float, state: State, settings: SentinelSettings) -> tuple[Row, State]:
    """Return the row of a single checkpoint, and the new state."""
    values = torch.tensor([value])
    levels, after = rule.check(values, torch.tensor([True]), state, settings)
    (row,) = rule.table(values, levels, state).tolist()
    return dict(zip(columns_of(rule), row, strict=True)), after


def run(values: Sequence[float], settings: SentinelSettings) -> list[Row]:
    rule = RULES[settings.detector]
    state, rows = rule.fresh(1, "cpu"), []
    for value in values:
        row, state = check_one(rule, value, state, settings)
        rows.append(row)
    return rows


def levels_of(values: Sequence[float], settings: SentinelSettings) -> list[float]:
    return [row["level"] for row in run(values, settings)]


def oracle_v2(values: Sequence[float], settings: SentinelSettings) -> list[Row]:
    """Follow the published text of the algorithm, one number at a time."""
    pre, low, high, rows = float32(0), None, None, list[Row]()
    for step, value in enumerate(map(float32, values)):
        jump = float32(0)
        if low is not None and high is not None and high > low and math.isfinite(pre) and math.isfinite(value):
            jump = abs(value - pre) / (high - low)
        armed = step >= settings.min_steps
        if not math.isfinite(value) or value > settings.upper_thresh[0] or (armed and jump > settings.sigma_thresh[0]):
            level = ERROR
        elif value > settings.upper_thresh[1] or (armed and jump > settings.sigma_thresh[1]):
            level = WARNING
        else:
            level = NORMAL
        shown = (value, pre, low or 0, high or 0, step, level)
        rows.append(dict(zip(columns_of(RULES["v2"]), [float(number) for number in shown], strict=True)))
        if level != ERROR:
            low, high = value if low is None else min(low, value), value if high is None else max(high, value)
        pre = value
    return rows


def oracle_v3(values: Sequence[float], settings: SentinelSettings) -> list[Row]:
    pre, average, normal, rows = float32(0), float32(0), 0, list[Row]()
    for step, value in enumerate(map(float32, values)):
        before, level = (pre, average, normal), NORMAL
        if not math.isfinite(value):
            level = ERROR
        elif value != 0:
            first = second = value
            if normal >= settings.min_steps and average != 0:
                mean = average / float32(1 - 0.99**normal)
                first, second = mean * float32(settings.upper_thresh[0]), mean * float32(settings.upper_thresh[1])
            if value > first and abs(value - pre) > first:
                level = ERROR
            elif value > second:
                level = WARNING
            else:
                normal += 1
                average = float32(0.99) * average + float32(0.01) * value
        pre = value
        rows.append(
            dict(zip(columns_of(RULES["v3"]), [float(number) for number in (value, *before, step, level)], strict=True))
        )
    return rows


ORACLES: dict[str, Callable[[Sequence[float], SentinelSettings], list[Row]]] = {"v2": oracle_v2, "v3": oracle_v3}

VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0, 99.0, 100.0, 101.0, 1000.0, 1001.0, 1e30, 3e38, INF, NAN]),
    st.floats(0, 5, width=32),
    st.floats(0, 2.0**100, width=32),
)


def same(rows: list[Row], expected: list[Row]) -> None:
    assert [list(row) for row in rows] == [list(row) for row in expected]
    numpy.testing.assert_array_equal([list(row.values()) for row in rows], [list(row.values()) for row in expected])


@BOTH
@given(values=st.lists(VALUES, max_size=24))
@hypothesis_settings(max_examples=100)
def test_a_detector_agrees_with_its_published_algorithm(detector: str, values: list[float]) -> None:
    settings = V2_SETTINGS if detector == "v2" else V3_SETTINGS
    with numpy.errstate(all="ignore"):
        same(run(values, settings), ORACLES[detector](values, settings))


@BOTH
@given(st.lists(st.lists(st.tuples(VALUES, st.booleans()), min_size=5, max_size=5), max_size=12))
@hypothesis_settings(max_examples=30)
def test_checkpoints_do_not_touch_each_other_and_unseen_ones_keep_their_state(
    detector: str, steps: list[list[tuple[float, bool]]]
) -> None:
    settings = V2_SETTINGS if detector == "v2" else V3_SETTINGS
    rule = RULES[settings.detector]
    state, rows = rule.fresh(5, "cpu"), list[list[list[float]]]()
    for step in steps:
        values, seen = torch.tensor([value for value, _ in step]), torch.tensor([is_seen for _, is_seen in step])
        levels, after = rule.check(values, seen, state, settings)
        assert levels.dtype == torch.int8
        assert levels[~seen].tolist() == [NORMAL] * int((~seen).sum())
        rows.append(rule.table(values, levels, state).tolist())
        state = after
    for index in range(5):
        alone = run([step[index][0] for step in steps if step[index][1]], settings)
        together = [rows[number][index] for number, step in enumerate(steps) if step[index][1]]
        numpy.testing.assert_array_equal([list(row.values()) for row in alone], together)


# -- the logs ---------------------------------------------------------------------------------------------------------


def logged(values: Sequence[float], mode: int) -> list[str]:
    """Return the lines of the last checks, without the prefix of rank and checkpoint."""
    settings = read_settings(mode, "v2", None, None, {})[0]
    lines = []
    for row in run(values, settings):
        state = {name: row[name] for name in RULES["v2"].start}
        check = Check(0, "norm", 0, 0, int(row["level"]), row["value"], state)
        lines.append(log_lines(check, settings)[0].removeprefix("[rank 0] [norm] "))
    return lines


def test_a_fault_on_another_rank_gives_the_lines_of_mode_1() -> None:
    lines = logged([0.11, 0.130423, 0.089474, 0.12, 0.105156, 0.100089, NAN, NAN], mode=1)
    assert lines[-2:] == [mindspore_log.MODE_1[0], mindspore_log.MODE_1[4]]
    lines = logged([0.0265, 0.026949, 0.0266, 0.0267, 0.0268, 0.026273, NAN, NAN], mode=1)
    assert lines[-2:] == [mindspore_log.MODE_1[1], mindspore_log.MODE_1[5]]
    assert logged([0.005931] * 5 + [0.005759, NAN], mode=1)[-1] == mindspore_log.MODE_1[2]
    assert logged([0.004272] * 5 + [0.004188, NAN], mode=1)[-1] == mindspore_log.MODE_1[3]


@pytest.mark.parametrize(("mode", "lines"), [(2, mindspore_log.MODE_2), (3, mindspore_log.MODE_3)])
def test_a_fault_on_this_rank_gives_the_line_of_modes_2_and_3(mode: int, lines: list[str]) -> None:
    assert logged([0.11, 0.130423, 0.089474, 0.12, 0.105156, INF], mode)[-1:] == lines


def test_normal_values_give_the_lines_of_mode_3() -> None:
    changing, constant, zero = mindspore_log.MODE_3_NORMAL
    assert logged([0.00423, 0.004189, 0.00425, 0.004272, 0.00422], mode=3)[-1] == changing
    assert logged([0.0078124] * 6, mode=3)[-1] == constant
    assert logged([0.0] * 6, mode=3)[-1] == zero


def test_lines_of_v3_have_the_fields_of_the_host_detector() -> None:
    values = {"pre": 1.25e-5, "avg": 2e-05, "normal": 40.0, "checks": 55.0}
    check = Check(2, "blocks.0.norm", 5, 1, ERROR, 3.5e7, values)
    settings = read_settings(2, "v3", None, None, {})[0]
    named, prefix = "param name [blocks.0.norm]", "[rank 2] [blocks.0.norm] "
    rest = (
        "value [3.5e+07], previous value [1.25e-05], history avg [2e-05], bp time [step 5, micro-batch 1], "
        "normal count [40]."
    )
    assert log_lines(check, settings) == [f"{prefix}A grad-norm spike may happen: {named}, abnormal {rest}"]
    suspect = f"{prefix}A value is suspect, and not learnt from: {named}, {rest}"
    assert log_lines(replace(check, level=WARNING), settings) == [suspect]
    assert log_lines(replace(check, level=NORMAL), settings) == [
        f"{prefix}A value is normal: {named}, {rest}",
        f"{prefix}upper_thresh1 = [1e+06], upper_thresh2 = [100], min_steps = [10], mode = [2]",
    ]


def test_a_nan_of_another_rank_arrives_as_the_value_of_its_alarm() -> None:
    check = Check(2, "blocks.0.norm", 5, 0, ERROR, NAN, {"pre": NAN, "min": 0.5, "checks": 7.0})
    finding = threshold_finding({0: None, 2: decode(encode(alarm_tree([check])))})
    assert finding is not None
    assert (finding.culprit_ranks, finding.name) == ((2,), "blocks.0.norm")
    assert finding.value is not None
    assert math.isnan(finding.value)
    assert "rank 2: blocks.0.norm, micro-batch 0: value nan after 7 checks (pre nan, min 0.5)" in finding.text


# -- sentence by sentence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "values", "levels"),
    [
        (V2_SETTINGS, [1001.0], [ERROR]),  # thresholds count from the first check, and jumps do not
        (V2_SETTINGS, [101.0], [WARNING]),
        (V2_SETTINGS, [1.0, 2.0, 9.0], [NORMAL] * 3),
        (V2_SETTINGS, [1.0, 2.0, 1.0, 2.0, 4.5], [NORMAL] * 4 + [WARNING]),  # by more than 2 times the range so far
        (V2_SETTINGS, [20.0, 21.0, 20.0, 21.0, 13.5], [NORMAL] * 4 + [ERROR]),  # by more than 5 times, downwards
        (V2_SETTINGS, [1.0, 2.0, 1.0, 2.0, INF, 90.0], [NORMAL] * 4 + [ERROR, NORMAL]),  # no jump from infinity
        (V2_SETTINGS, [1.0] * 9 + [90.0], [NORMAL] * 10),  # constant values never jump
        (V3_SETTINGS, [1.0, 0.0, 1.0, 0.0, 1e9], [NORMAL] * 5),  # three values other than zero are needed
        (V3_SETTINGS, [1.0, 1.0, 1.0, 90.0, 90.0], [NORMAL] * 3 + [ERROR, WARNING]),  # which stays is an error once
        (V3_SETTINGS, [1.0, 1.0, 1.0, 5.0, 60.0, NAN, 1.0], [NORMAL] * 3 + [WARNING, ERROR, ERROR, NORMAL]),
    ],
)
def test_levels_are_as_documented(settings: SentinelSettings, values: list[float], levels: list[float]) -> None:
    assert levels_of(values, settings) == levels


# -- tensors ----------------------------------------------------------------------------------------------------------


@BOTH
def test_check_and_table_change_nothing_that_they_are_given(detector: str) -> None:
    settings = defaults(detector)
    rule, seen = RULES[settings.detector], torch.ones(3, dtype=torch.bool)
    _, state = rule.check(torch.tensor([1.0, 2.0, NAN]), seen, rule.fresh(3, "cpu"), settings)
    inputs = [*state, torch.tensor([INF, 2.5, 3.0]), seen]
    before = [tensor.clone() for tensor in inputs]
    levels, after = rule.check(inputs[-2], seen, state, settings)
    rule.table(inputs[-2], levels, state)
    torch.testing.assert_close(inputs, before, rtol=0, atol=0, equal_nan=True)
    assert not {tensor.data_ptr() for tensor in inputs} & {tensor.data_ptr() for tensor in after}


@BOTH
def test_no_check_reads_a_tensor(detector: str) -> None:
    # On this device there is nothing to read: any .item(), or any branch on a value, is an error.
    settings = defaults(detector)
    rule = RULES[settings.detector]
    state = rule.fresh(4, "meta")
    values, seen = torch.empty(4, device="meta"), torch.empty(4, dtype=torch.bool, device="meta")
    levels, after = rule.check(values, seen, state, settings)
    assert [(tensor.shape, tensor.dtype) for tensor in after] == [(tensor.shape, tensor.dtype) for tensor in state]
    table = rule.table(values, levels, state)
    assert (table.shape, table.dtype, table.device.type) == ((4, len(columns_of(rule))), torch.float64, "meta")
    assert rule.value_of(torch.empty(3, 3, device="meta")).shape == ()
    with pytest.raises((NotImplementedError, RuntimeError)):
        values.sum().item()


@BOTH
def test_counts_are_exact_beyond_float32(detector: str) -> None:
    settings = defaults(detector)
    rule = RULES[settings.detector]
    *memory, checks = rule.fresh(1, "cpu")
    row, after = check_one(rule, 1.0, (*memory, checks + 2**24), settings)
    assert row["checks"] == 2**24
    assert after[-1].item() == 2**24 + 1


@BOTH
def test_a_large_threshold_does_not_hide_infinity(detector: str) -> None:
    settings = read_settings(1, detector, (2e38, 1e38), (2e38, 1e38), {})[0]
    assert levels_of([1.0] * 12 + [3e38, INF, NAN], settings)[-2:] == [ERROR, ERROR]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_value_is_the_l2_norm_for_v2_and_the_squared_maximum_for_v3(dtype: torch.dtype) -> None:
    gradient = torch.tensor([[3.0, -4.0], [0.0, 12.0]], dtype=dtype)
    values: list[Any] = [RULES[detector].value_of(gradient) for detector in ("v2", "v3")]
    assert [value.item() for value in values] == [13.0, 144.0]
    assert RULES["v3"].value_of(-gradient).item() == 144.0
    assert all(value.shape == () and value.dtype == torch.float32 for value in values)
    for rule in RULES.values():
        assert rule.value_of(torch.zeros(0, 3, dtype=dtype)).item() == 0
        assert rule.value_of(torch.full((), -2.0, dtype=dtype)).item() == (4 if rule is RULES["v3"] else 2)
        for bad in (NAN, INF, -INF):
            gradient[0, 1] = bad
            assert not math.isfinite(rule.value_of(gradient).item())
            gradient[0, 1] = -4


def test_values_of_half_precision_are_accumulated_in_float32() -> None:
    assert RULES["v2"].value_of(torch.full((10000,), 256.0, dtype=torch.float16)).item() == 25600.0
    assert RULES["v2"].value_of(torch.ones(10001, dtype=torch.bfloat16)).item() == pytest.approx(10001**0.5, rel=1e-6)
    assert RULES["v3"].value_of(torch.full((3,), 60000.0, dtype=torch.float16)).item() == float32(60000) ** 2
