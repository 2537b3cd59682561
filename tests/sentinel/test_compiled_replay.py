"""Peer replay of compiled programs takes rounding for no rank's fault, and finds faults beyond it."""

from __future__ import annotations

import pytest
import torch

from ddpstats._rerun.record import StepRecord
from ddpstats._rerun.run import Reruns
from ddpstats.testing import run_ranks
from tests.sentinel import compiled_runs as runs, replay_runs
from tests.sentinel.compiled_runs import Program

pytestmark = pytest.mark.slow
LIMIT_SEC = 120.0
COMPILED = (
    "a part of the step is compiled, or does not pass the model's forward(). Peers' gradients are compared by their "
    "norms, with room for 1.0e-02"
)


def outcomes_of(program: Program) -> list[tuple[list[bool], str, list[str]]]:
    """Return for each rank whether each step was fine, the error, and the warnings of peer replay."""
    outcomes: list[replay_runs.ReplayOutcome] = run_ranks(runs.run, 3, program, timeout_sec=LIMIT_SEC).values()
    return [
        (outcome.ok, outcome.error, [warning for warning in outcome.warnings if "peer replay" in warning])
        for outcome in outcomes
    ]


@pytest.mark.parametrize(
    "program",
    [Program(zero_ranks=(0, 1, 2), zero_until=1, compiled_from=0), Program(compiled_ranks=(1,))],
    ids=["a loss of 0 at first", "one rank"],
)
def test_rounding_of_a_compiled_program_is_one_warning_and_no_fault(program: Program) -> None:
    for ok, error, warnings in outcomes_of(program):
        assert (ok, error) == ([True] * 4, "")
        assert len(warnings) == 1
        assert COMPILED in warnings[0]


@pytest.mark.parametrize(
    "program",
    [Program(compiled_from=2, fault=(2, 2)), Program(compiled_ranks=(1,), fault=(1, 0))],
    ids=["while it begins to round", "inside"],
)
def test_a_fault_beyond_rounding_is_found_in_a_compiled_program(program: Program) -> None:
    rank, step = program.fault
    for ok, error, _ in outcomes_of(program):
        assert len(ok) == step
        assert f"Rank {rank} was wrong once and right once" in error
        assert f"step {step}, found by the sentinel" in error


def test_a_difference_on_most_ranks_is_a_warning_and_then_an_error_of_replay_fn() -> None:
    for ok, error, warnings in outcomes_of(Program(factor_from=2)):
        assert ok == [True] * 3
        assert "replay_fn is not the step that was trained" in error  # at the next time
        assert len(warnings) == 1
        assert "Most ranks' steps are not what comes of running them again" in warnings[0]


def test_gradients_that_are_all_zero_are_no_evidence() -> None:
    for ok, error, warnings in outcomes_of(Program(zero_ranks=(0, 1, 2))):
        assert (ok, error, warnings) == ([True] * 4, "", [])


def test_a_step_that_does_not_call_forward_may_be_compiled_and_the_warning_says_so() -> None:
    for outcome in run_ranks(replay_runs.run_without_forward, 2, timeout_sec=LIMIT_SEC).values():
        assert (outcome.ok, outcome.error) == ([True] * 2, "")
        assert [COMPILED in warning for warning in outcome.warnings] == [True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_a_program_that_may_become_another() -> None:
    model = replay_runs.Small()
    model.first = torch.jit.script(model.first)  # type: ignore[assignment]
    record = StepRecord(model)
    try:
        assert Reruns(record, replay_runs.loss_of, "replay_fn", lambda: 1.0).is_compiled
    finally:
        record.close()
