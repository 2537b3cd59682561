"""Survivors raise `RankMissing` where the rank that serves the store is lost.

Rank 0 serves the store, as `init_process_group` with ``tcp://`` or ``env://`` has it. `benchmarks/test_store_host.py`
has guards, checks of a step and bundles, and `tests/faults` calls in the middle of which the rank dies.
"""

from __future__ import annotations

import pytest

from ddpstats.testing import run_ranks
from tests.programs import reserved_port
from tests.ranks import store_host_runs as runs


@pytest.mark.parametrize(
    "phase",
    ["during", pytest.param("before", marks=pytest.mark.slow), pytest.param("between", marks=pytest.mark.slow)],
)
def test_death_of_rank_that_serves_store_is_rank_missing_for_all_calls(phase: str) -> None:
    with reserved_port() as port:
        outcomes = run_ranks(runs.lose_rank_0, 3, port, phase, timeout_sec=150.0)
    assert outcomes[0].exit_code == -9
    runs.check([outcome.value for outcome in outcomes[1:]])


@pytest.mark.slow
def test_rank_whose_group_ends_while_it_waits_does_not_name_itself() -> None:
    with reserved_port() as port:
        attempt = run_ranks(runs.end_group_while_waiting, 2, port, timeout_sec=60.0)[0].value
    assert attempt.missing == [1], attempt
    assert "rank 1: the process is gone" in attempt.text


@pytest.mark.slow
def test_stopped_rank_that_serves_store_raises_what_the_others_raised() -> None:
    with reserved_port() as port:
        attempts = run_ranks(runs.stop_rank_0, 3, port, timeout_sec=60.0).values()
    assert len({(tuple(attempt.missing), attempt.text) for attempt in attempts}) == 1, attempts
    assert attempts[0].missing == [0]
    assert "rank 0: serves the store, which does not answer" in attempts[0].text
    assert max(attempt.after_sec for attempt in attempts[1:]) < runs.LIMIT_SEC
