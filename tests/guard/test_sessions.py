"""Guards one after another, and process groups under one guard, agree also where a rank was idle under the first."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats._base.config import GuardMode
from ddpstats.testing import run_ranks
from tests.guard import session_runs as runs

UNMARKED = [("subgroup", "another guard", "step"), ("message", "another life", "strict")]
CASES = itertools.product(
    ("subgroup", "message", "nothing"), ("another guard", "another life"), ("strict", "step", "record")
)


@pytest.mark.parametrize(
    ("before", "after", "mode"),
    [pytest.param(*case, marks=() if case in UNMARKED else pytest.mark.slow) for case in CASES],
)
def test_rank_that_was_idle_goes_on_with_the_others(
    before: str, after: str, mode: GuardMode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_ranks(runs.gone_on, 3, before, after, mode, str(tmp_path), timeout_sec=60)
    assert outcomes.values() == [3.0] * 3
    assert cli.main(["report", str(tmp_path / "records")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("alike", [True, False])
def test_groups_of_one_name_and_other_members_are_not_compared(alike: bool) -> None:
    assert run_ranks(runs.of_one_name, 2, alike, timeout_sec=60).values() == [alike] * 2
