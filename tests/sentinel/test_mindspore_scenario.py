"""MindSpore's documented scenario: four ranks, a fault on rank 2 at step 5, in modes 1, 2 and 3; line by line."""

from __future__ import annotations

import re

from ddpstats.testing import RankPool
from tests.sentinel import scenario_runs as runs
from tests.sentinel.mindspore_log import MODE_1, MODE_2, MODE_3, MODE_3_CONSTANTS, MODE_3_NORMAL

FIELD = re.compile(r"(\w+) = \[([^]]*)\]")


def fields(line: str) -> list[tuple[str, str]]:
    return FIELD.findall(line)


def names(line: str) -> list[str]:
    return [name for name, _ in fields(line)]


def value(line: str, name: str) -> str:
    return dict(fields(line))[name]


def own_part(line: str) -> str:
    """Without the prefix that names rank and checkpoint, and without numbers."""
    return FIELD.sub(r"\1 = []", re.sub(r"^\[rank \d\] \[[\w.]+\] ", "", line))


def run(pool: RankPool, mode: int) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """What became of the training, and what was logged, by rank."""
    outcomes = pool.run(runs.silent_fault, mode).values()
    return [words for words, _ in outcomes], [lines for _, lines in outcomes]


def test_mode_2_stops_all_ranks_with_one_line_on_the_origin(four_ranks: RankPool) -> None:
    became, logged = run(four_ranks, 2)
    assert became == ["stopped at step 5, culprit ranks [2]"] * 4
    assert [logged[rank] for rank in (0, 1, 3)] == [[], [], []]
    ((level, line),) = logged[2]
    assert level == "ERROR"
    assert line.startswith("[rank 2] [1] ")
    assert own_part(line) == own_part(MODE_2[0])
    for name in ("val", "step", "c_min_steps", "c_thresh_l1", "c_coeff_l1", "c_thresh_l2", "c_coeff_l2"):
        assert value(line, name) == value(MODE_2[0], name), name
    assert value(line, "npu_asd_detect") == "2"
    assert 0 < float(value(line, "min_val")) <= float(value(line, "pre_val")) <= float(value(line, "max_val"))


def test_mode_1_goes_on_and_every_rank_has_nan_from_the_next_step_on(four_ranks: RankPool) -> None:
    became, logged = run(four_ranks, 1)
    assert became == ["went on to step 7"] * 4
    for rank, lines in enumerate(logged):
        errors = [line for level, line in lines if level == "ERROR"]
        assert [level for level, _ in lines] == ["ERROR"] * len(lines)
        first = [line for line in errors if value(line, "step") == "5"]
        assert [value(line, "val") for line in first] == (["inf"] if rank == 2 else [])
        later = errors[len(first) :]
        assert [(value(line, "step"), value(line, "val")) for line in later] == [("6", "nan")] * 2 + [("7", "nan")] * 2
        assert {own_part(line) for line in errors} == {own_part(MODE_1[0])}
        assert [value(line, "npu_asd_detect") for line in errors] == ["1"] * len(errors)


def test_mode_1_keeps_the_state_as_documented(four_ranks: RankPool) -> None:
    """A NaN becomes the previous value, and never a minimum or maximum."""
    _, logged = run(four_ranks, 1)
    lines = [line for _, line in logged[0]]  # a rank that has the NaN from others
    before, after = lines[:2], lines[2:]
    for ours, documented in zip((before, after), (MODE_1[:4], MODE_1[4:]), strict=True):
        assert {value(line, "pre_val") == "nan" for line in ours} == {
            value(line, "pre_val") == "nan" for line in documented
        }
    for one, other in zip(before, after, strict=True):
        assert [value(one, name) for name in ("min_val", "max_val")] == [
            value(other, name) for name in ("min_val", "max_val")
        ]
        assert float(value(one, "min_val")) > 0


def test_mode_3_logs_normal_values_too_and_then_the_one_error(four_ranks: RankPool) -> None:
    became, logged = run(four_ranks, 3)
    assert became == ["stopped at step 5, culprit ranks [2]"] * 4
    *normal, (level, error) = logged[2]
    assert (level, own_part(error), value(error, "step")) == ("ERROR", own_part(MODE_3[0]), "5")
    assert {level for level, _ in normal} == {"INFO"}
    values, constants = [line for _, line in normal[::2]], [line for _, line in normal[1::2]]
    assert {own_part(line) for line in values} == {own_part(MODE_3_NORMAL[0])}
    assert {line.partition("] c_")[2] for line in constants} == {MODE_3_CONSTANTS.removeprefix("c_")}
    assert [value(line, "step") for line in values] == ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4", "5"]
    for rank in (0, 1, 3):
        assert {level for level, _ in logged[rank]} == {"INFO"}
        assert len(logged[rank]) == 2 * 2 * 6  # two lines for each of two checkpoints in six steps
