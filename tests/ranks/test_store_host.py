"""Survivors raise one `RankMissing` where the rank that serves the store is lost, or one before its first use.

Rank 0 serves the store, as `init_process_group` with ``tcp://`` or ``env://`` has it. `benchmarks/test_store_host.py`
has guards, checks of a step and bundles, and `tests/faults` calls in the middle of which the rank dies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ddpstats.testing import run_ranks
from tests.programs import Program, environ_of, reserved_port
from tests.ranks import store_host_runs as runs

VICTIM = 1  # of the ranks that are started with the variables that torchrun sets


@pytest.mark.parametrize(
    "phase",
    ["during", pytest.param("before", marks=pytest.mark.slow), pytest.param("between", marks=pytest.mark.slow)],
)
def test_death_of_rank_that_serves_store_is_one_rank_missing_for_all_calls(phase: str) -> None:
    with reserved_port() as port:
        outcomes = run_ranks(runs.lose_rank_0, 3, port, phase, timeout_sec=150.0)
    assert outcomes[0].exit_code == -9
    runs.check([outcome.value for outcome in outcomes[1:]], 0)


@pytest.mark.slow
def test_death_of_launched_rank_before_first_use_is_known_at_once() -> None:
    """The survivors know of it by the environment that the launcher gave it, which /proc shows."""
    with reserved_port() as port:
        programs = [_launched(rank, port) for rank in range(3)]
        ended = [program.finish() for program in programs]
    assert [done.returncode for done in ended] == [0, 128 + 9, 0], ended
    survivors = [json.loads(ended[rank].stdout) for rank in (0, 2)]
    runs.check([_survivor(*parts) for parts in survivors], VICTIM, limit_sec=2 * 1.0 + 5.0)  # within a second


def _launched(rank: int, port: int) -> Program:
    environ = environ_of(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="FATAL")
    environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    # The parent is a shell: a sibling without RANK in its environment, as pytest's fork server, might hide a rank.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    return Program(["-m", "tests.ranks.test_store_host", str(rank), str(port)], environ, prefix=shell)


def _survivor(first: dict[str, list[Any]], again: dict[str, list[Any]], left: list[str]) -> runs.Survivor:
    return runs.Survivor(_attempts(first), _attempts(again), left)


def _attempts(printed: dict[str, list[Any]]) -> dict[str, runs.Attempt]:
    return {name: runs.Attempt(*values) for name, values in printed.items()}


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


if __name__ == "__main__":
    runs.serve(int(sys.argv[1]), 3, int(sys.argv[2]), timeout_sec=20.0)
    print(json.dumps(runs.kill_rank(VICTIM, runs.reductions(), "before")), flush=True)
