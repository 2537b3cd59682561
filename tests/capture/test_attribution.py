"""What the cause is said to be: only where the rerun is of the step that was trained, and in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats import RankMissing
from ddpstats.capture._bundle import Bundle
from ddpstats.testing import RankPool, run_ranks
from tests.capture import peers_runs as runs


@pytest.mark.parametrize(
    ("trained", "step", "keeps_loss", "cause"),
    [
        (
            "table_step",
            "table_step",
            True,
            ["hardware of rank 1 (host ", "or something that only rank 1 holds outside"],
        ),
        (
            "auxiliary_gradient",
            "another_loss_step",
            True,
            ["step_fn is not the step that was trained", "micro-batch 0: the loss was ", "the gradients are finite"],
        ),
        (
            "scaled",
            "plain_step",
            False,
            ["step_fn is not the step that was trained", "the gradient of 0.bias had norm ", "and now had norm "],
        ),
        ("auxiliary", "plain_step", False, ["a race or a transient fault on rank 1", "Or step_fn leaves out"]),
        ("auxiliary", "auxiliary", True, ["hardware of rank 1", "or something that only rank 1 holds"]),
    ],
    ids=range(5),
)
def test_the_cause(
    two_ranks: RankPool, tmp_path: Path, trained: str, step: str, keeps_loss: bool, cause: list[str]
) -> None:
    first, second = two_ranks.run(runs.attributed, str(tmp_path), trained, step, keeps_loss).values()
    assert first == second
    assert first is not None
    assert all(part in first for part in cause), first
    assert ("Cause not found" in first) == ("not the step" in cause[0])


def test_a_culprit_that_dies_in_its_rerun_leaves_a_whole_bundle(tmp_path: Path) -> None:
    first, second = run_ranks(runs.attributed, 2, str(tmp_path), "dying_step", "dying_step", timeout_sec=40)
    assert second.exit_code == 9
    assert isinstance(first.error, RankMissing)
    assert first.error.missing_ranks == (1,)
    bundle = Bundle.open(tmp_path)
    assert bundle.manifest.complete
    assert bundle.manifest.culprit_ranks == (1,)


def test_runs_that_would_take_too_long_are_left_out(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.attributed_slowly, str(tmp_path)).values()
    assert first == second
    assert first is not None
    assert "and so does rank 1" in first
    assert "In float32 without autocast it was not run: one run took 1." in first
    assert "DDPSTATS_TIMEOUT_SEC leaves no time for more" in first
