"""A timeout that the program gave to a group or a call ends the wait, with torch's own error, also under a guard."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats.guard.group import GuardMode
from ddpstats.testing import run_ranks
from tests.guard import timeout_runs as runs
from tests.guard.tiers import tiers

LATE_SEC = 1.5  # on a machine with other work; the promise is one second

CASES = tiers(
    [("strict", "all_reduce"), ("strict", "options with timeout"), ("step", "barrier")],
    [
        ("step", "options with timeout"),
        *((mode, call) for mode in ("strict", "step") for call in ("all_gather", "async", "wait(timeout)")),
        *(("strict", "monitored_barrier(timeout)"), ("step", "monitored_barrier(timeout)")),
        *(("strict", "barrier"), ("step", "all_reduce")),
    ],
)


@pytest.mark.parametrize(("mode", "call"), CASES)
def test_torchs_own_timeout_is_caught_in_time_and_the_program_goes_on(mode: GuardMode, call: str) -> None:
    limited_group = "timeout" not in call
    caught, absent = run_ranks(runs.stays_away, 2, mode, call, 1, limited_group, timeout_sec=60).values()
    assert (caught[0], caught[2]) == ("RuntimeError", "nothing"), caught
    assert runs.LIMIT_SEC - 0.5 < caught[1] < runs.LIMIT_SEC + LATE_SEC
    assert absent == ("nothing", 0.0, "nothing")


@pytest.mark.parametrize("mode", tiers(["step"], ["strict"]))
def test_guards_own_limit_does_not_lengthen_that_of_the_group(mode: GuardMode) -> None:
    caught, _ = run_ranks(runs.stays_away, 2, mode, "async", 1, True, guard_sec=12.0, timeout_sec=60).values()
    assert (caught[0], caught[2]) == ("RuntimeError", "nothing"), caught
    assert caught[1] < runs.LIMIT_SEC + LATE_SEC


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_all_ranks_that_wait_catch_torchs_own_timeout(mode: GuardMode) -> None:
    *waiting, absent = run_ranks(runs.stays_away, 3, mode, "all_reduce", 2, True, timeout_sec=60).values()
    for caught in waiting:
        assert (caught[0], caught[2]) == ("RuntimeError", "nothing"), caught
        assert caught[1] < runs.LIMIT_SEC + LATE_SEC
    assert absent == ("nothing", 0.0, "nothing")


@pytest.mark.parametrize("mode", tiers(["strict"], ["step"]))
def test_timeout_of_default_group_is_torchs_error_with_a_note_that_names_the_rank(
    mode: GuardMode, tmp_path: Path
) -> None:
    caught, _ = run_ranks(runs.default_group_is_limited, 2, mode, str(tmp_path), timeout_sec=60).values()
    assert caught[0] == "RuntimeError", caught
    assert caught[1] < runs.LIMIT_SEC + LATE_SEC
    assert "rank 1 did not come to collective number 2 of the default group" in caught[2]
    assert "timeout_runs.py" in caught[2]


WITHOUT_MEMORY = tiers([("step", (0, 1, 2))], [("step", (1,)), ("strict", (0, 1, 2)), ("strict", (1,))])


@pytest.mark.parametrize(("mode", "without_memory"), WITHOUT_MEMORY)
def test_note_names_no_rank_of_which_nothing_is_known(mode: GuardMode, without_memory: tuple[int, ...]) -> None:
    notes = run_ranks(runs.note_on_absence, 3, mode, 2, without_memory, timeout_sec=60).values()
    assert any(notes)  # the rank that gives up first has one, at least
    for note in filter(None, notes):
        assert "did not come" in note or mode == "step", note
        assert "rank 2 did not come" in note or "not all ranks came" in note, note


@pytest.mark.parametrize("mode", tiers(["strict"], ["step"]))
def test_program_that_catches_runtime_error_catches_the_death_of_a_rank(mode: GuardMode) -> None:
    survivor = run_ranks(runs.dies, 2, mode, 1, timeout_sec=60)[0]
    assert survivor.value == ("RankMissing", True)
