"""A process that a rank forks is under no guard, and leaves memory, store, record and notes of the rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats.guard.record import read_records
from ddpstats.testing import run_ranks
from tests.guard import fork_runs

LIMIT_SEC = 90.0


@pytest.mark.parametrize(
    "mode", ["step", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("strict", "record"))]
)
def test_forked_process_that_leaves_the_guard_touches_nothing_of_the_ranks(mode: str, tmp_path: Path) -> None:
    compared = 0 if mode == "record" else 2
    endings = run_ranks(fork_runs.forked_inside, 2, mode, str(tmp_path), timeout_sec=LIMIT_SEC).values()
    assert endings == [(0, "", 0, (2, compared))] * 2
    for record in read_records(tmp_path):
        assert [event.seq for event in record.events] == [1, 2]
        assert record.marks == ()
        lines = (tmp_path / f"rank{record.rank}.jsonl").read_text().splitlines()
        assert ['"end"' in line for line in lines] == [False] * (len(lines) - 1) + [True]
