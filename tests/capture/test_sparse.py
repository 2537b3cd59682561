"""Capture and sentinel see sparse gradients as they are: reduced in place, a row more than once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats.testing import RankPool
from tests.capture import sparse_runs as runs

NAMES = ["--model", "tests.capture.sparse_runs:make_model", "--step", "tests.capture.sparse_runs:step"]
slow = pytest.mark.slow


def _with_slow(*cases: str) -> list[object]:
    """Return the first case, and the others as slow ones."""
    return [cases[0], *(pytest.param(case, marks=slow) for case in cases[1:])]


@pytest.mark.parametrize("case", _with_slow("ddp", "ddp view", "ddp bag", "ddp dropout", "alone", "alone dense zeros"))
def test_a_correct_replay_fn_is_taken(two_ranks: RankPool, case: str) -> None:
    for culprits in two_ranks.run(runs.watched_by_a_sentinel, case).values():
        assert culprits == [(), (), ()]


@pytest.mark.parametrize("negative", [False, True])
def test_a_replay_fn_with_other_rows_or_signs_is_refused(two_ranks: RankPool, negative: bool) -> None:
    first, second = two_ranks.run(runs.refused, negative).values()
    assert first == second
    assert "replay_fn is not the step that was trained" in first


def test_a_wrong_sparse_gradient_is_found(three_ranks: RankPool) -> None:
    for culprits in three_ranks.run(runs.watched_by_a_sentinel, "ddp", True).values():
        assert culprits == [(), (), (1,)]


@pytest.mark.parametrize("case", _with_slow("ddp", "ddp view", "ddp bag", "alone"))
def test_the_culprit_is_named_and_its_step_replayed(
    two_ranks: RankPool, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two_ranks.run(runs.captured_case, case, 1, str(tmp_path)).values()
    assert first == second
    assert [verdict.kind for verdict in first] == ["ok", "nonfinite", "ok"]
    verdict = first[1]
    assert verdict.culprit_ranks == (1,)
    assert "table.weight" in verdict.parameters
    if "bag" in case:
        return
    capsys.readouterr()
    for rank, status in (("1", 0), ("0", 1)):
        assert cli.main(["replay", str(verdict.bundle), *NAMES, "--json", "--rank", rank, "--bisect"]) == status
        result = json.loads(capsys.readouterr().out)
        assert result["bit_for_bit"]["losses"] == result["bit_for_bit"]["norms"] == "equal"
        gradients = "equal" if rank == "1" else "not compared: the capture has none"
        assert result["bit_for_bit"]["gradients"] == gradients
        assert ("table.weight" in result["nonfinite_now"]) == (rank == "1")
        assert result["collectives"] == {}


def test_parts_of_a_row_that_are_finite_and_overflow_are_nonfinite(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.overflowing_parts, str(tmp_path)).values()
    assert first == second
    assert (first.kind, first.culprit_ranks) == ("nonfinite", (1,))


@slow
def test_the_cause_of_a_sparse_nan_is_found(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.captured_with_cause, str(tmp_path)).values()
    assert first == second
    assert first[1].attribution is not None
    assert first[1].attribution.startswith("Cause: software or data")
