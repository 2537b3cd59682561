"""Jobs that torchrun restarts, process groups that are made again, hundreds of subgroups: all from a clean state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpstats.testing import run_ranks
from tests import programs
from tests.faults import elastic_runs as runs

LIMIT_SEC = 200.0
pytestmark = pytest.mark.slow


def test_torchrun_restarts_a_job_whose_rank_died(tmp_path: Path) -> None:
    """Ranks meet on the store of the attempt before, and what that one left there is not theirs.

    torch itself does not tell the two apart (2.13), so the program deletes what torch had in the store.
    """
    program = str(Path(__file__).with_name("restarted.py"))
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = programs.run(
        [*run, program, str(tmp_path), "forgets"], timeout=LIMIT_SEC, environ={"TORCH_CPP_LOG_LEVEL": "FATAL"}
    )
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert told["0.0"]["verdicts"] == [[1], [1]], done.stderr
    assert done.returncode == 0, (told, done.stderr)
    for rank in ("1.0", "1.1"):
        assert told[rank]["came"] == "all"
        assert told[rank]["ok"]
        assert told[rank]["values"] == {"loss": 0.5, "attempt 1": 1.0}
        assert told[rank]["window"] == {"loss": 0.5}


def test_the_default_group_is_made_again_under_checks(tmp_path: Path) -> None:
    outcomes = run_ranks(runs.lives, 2, str(tmp_path), timeout_sec=120.0)
    assert outcomes.values() == [[*[True, True, False, {"loss": 0.5}, {"loss": 0.5}, True] * 2, True]] * 2


def test_two_hundred_subgroups_leave_nothing_behind() -> None:
    for early, late in run_ranks(runs.many_subgroups, 2, 200, timeout_sec=200.0).values():
        grown = late.pop("kilobytes") - early.pop("kilobytes")
        assert {what: (early[what], late[what]) for what in early if late[what] > early[what]} == {}
        assert grown < 8 * 1024, f"{grown} kB for 100 groups"
