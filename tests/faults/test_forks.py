"""A reduction in a process that a rank forks, such as a DataLoader's worker, is a `ConfigError`, and spoils nothing."""

from __future__ import annotations

import pytest

from ddpstats.testing import run_ranks
from tests.faults import fork_runs as runs

LIMIT_SEC = 90.0
REFUSED = "ConfigError: this process was forked from rank {}"


@pytest.mark.parametrize("first_use", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["later", "first use"])
def test_reduction_in_a_forked_process_is_config_error_and_the_rank_goes_on(first_use: bool) -> None:
    for rank, (told, later, kept) in enumerate(run_ranks(runs.forked, 2, first_use, timeout_sec=LIMIT_SEC).values()):
        for text, status in told:
            assert text.startswith(REFUSED.format(rank)), told
            assert status == 0
        assert told[-1][0].endswith("Adds: 1")  # of the window, which keeps them
        assert later == [{"loss": 0.5}] * 3
        assert kept == {"loss": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("watches", [False, True], ids=["alone", "under a guard"])
def test_reduction_in_workers_of_a_loader_is_config_error_and_the_rank_goes_on(watches: bool) -> None:
    for rank, (before, told, later) in enumerate(
        run_ranks(runs.in_workers, 2, watches, timeout_sec=LIMIT_SEC).values()
    ):
        assert before == later == {"loss": 0.5}
        assert all(text.startswith(REFUSED.format(rank)) for text in told), told
