"""Guards one after another, and process groups under one guard: what a rank did not take part in parts nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats._base.config import GuardMode
from ddpstats.testing import run_ranks
from tests.guard import session_runs as runs


@pytest.mark.parametrize("mode", ["strict", "step", "record"])
@pytest.mark.parametrize("after", ["another guard", "another life"])
@pytest.mark.parametrize("before", ["subgroup", "message", "nothing"])
def test_a_rank_that_did_nothing_under_the_first(
    before: str, after: str, mode: GuardMode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_ranks(runs.gone_on, 3, before, after, mode, str(tmp_path), timeout_sec=60)
    assert outcomes.values() == [3.0] * 3
    assert cli.main(["report", str(tmp_path / "records")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_made_their_groups_in_other_orders_do_not_meet(alike: bool) -> None:
    """torch calls such groups alike, and may connect ranks of different ones."""
    assert run_ranks(runs.of_one_name, 2, alike, timeout_sec=60).values() == [alike] * 2
