"""The sentinel does what MindSpore documents for four ranks with a fault on rank 2 at step 5, mode by mode."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests.sentinel import sentinel_runs as runs
from tests.sentinel.mindspore_log import MODE_1, MODE_2, MODE_3, MODE_3_CONSTANTS, MODE_3_NORMAL

FIELD = re.compile(r"(\w+) = \[([^]]*)\]")


def value(line: str, name: str) -> str:
    return str(dict(FIELD.findall(line))[name])


def own_part(line: str) -> str:
    """Return the line without the prefix that names rank and checkpoint, and without numbers."""
    return FIELD.sub(r"\1 = []", re.sub(r"^\[rank \d\] \[[\w.]+\] ", "", line))


@pytest.fixture(scope="module")
def outcomes(four_ranks: RankPool) -> Callable[[int], tuple[list[str], list[list[str]], list[list[str]]]]:
    """Run the scenario in one mode, once: what became of the training, all lines, and the problems among them."""

    @functools.cache
    def run(mode: int) -> tuple[list[str], list[list[str]], list[list[str]]]:
        became, lines, problems = zip(*four_ranks.run(runs.silent_fault, mode).values(), strict=True)
        return list(became), list(lines), list(problems)

    return run


def test_mode_2_stops_all_ranks_with_one_line_on_the_origin(outcomes: Any) -> None:
    became, lines, problems = outcomes(2)
    assert became == ["stopped at step 5, culprit ranks [2]"] * 4
    assert [lines[rank] for rank in (0, 1, 3)] == [[], [], []]
    (line,) = lines[2]
    assert problems[2] == [line]
    assert line.startswith("[rank 2] [1] ")
    assert own_part(line) == own_part(MODE_2[0])
    for name in ("val", "step", "c_min_steps", "c_thresh_l1", "c_coeff_l1", "c_thresh_l2", "c_coeff_l2"):
        assert value(line, name) == value(MODE_2[0], name), name
    assert value(line, "npu_asd_detect") == "2"
    assert 0 < float(value(line, "min_val")) <= float(value(line, "pre_val")) <= float(value(line, "max_val"))


def test_mode_1_goes_on_and_every_rank_has_nan_from_the_next_step_on(outcomes: Any) -> None:
    became, lines, problems = outcomes(1)
    assert became == ["went on to step 7"] * 4
    assert lines == problems
    for rank, errors in enumerate(lines):
        first = [line for line in errors if value(line, "step") == "5"]
        assert [value(line, "val") for line in first] == (["inf"] if rank == 2 else [])
        later = errors[len(first) :]
        assert [(value(line, "step"), value(line, "val")) for line in later] == [("6", "nan")] * 2 + [("7", "nan")] * 2
        assert {own_part(line) for line in errors} == {own_part(MODE_1[0])}
        assert [value(line, "npu_asd_detect") for line in errors] == ["1"] * len(errors)


@pytest.mark.slow
def test_mode_3_logs_normal_values_too_and_then_the_one_error(outcomes: Any) -> None:
    became, lines, problems = outcomes(3)
    assert became == ["stopped at step 5, culprit ranks [2]"] * 4
    *normal, error = lines[2]
    assert (own_part(error), value(error, "step")) == (own_part(MODE_3[0]), "5")
    assert problems == [[], [], [error], []]
    values, constants = normal[::2], normal[1::2]
    assert {own_part(line) for line in values} == {own_part(MODE_3_NORMAL[0])}
    assert {line.partition("] c_")[2] for line in constants} == {MODE_3_CONSTANTS.removeprefix("c_")}
    assert [value(line, "step") for line in values] == ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4", "5"]
    for rank in (0, 1, 3):
        assert len(lines[rank]) == 2 * 2 * 6  # two lines for each of two checkpoints in six steps
