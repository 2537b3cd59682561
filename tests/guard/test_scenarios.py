"""The guard names the fault of every scenario on every rank, and stays silent on its legal twin, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpstats.guard.record import diagnose, read_records
from ddpstats.testing import RankPool
from tests.guard.scenarios import DIES, SCENARIOS, latest_sec, probe
from tests.guard.tiers import tiers

# Scenarios that the tests without a mark play in mode step, and all others in mode strict.
UNMARKED_IN_STEP = {
    *("swap_of_equal_signature", "experts_of_each_rank", "reduce_op", "root", "extra_call", "after_many_good_ones"),
    *("asynchronous", "many_in_flight", "waited_for_with_a_timeout", "functional", "ddp_comm_hook", "coalesced_count"),
    *("subgroup_that_others_do_not_use", "legally_uneven", "message_dtype", "returns_early", "raises", "late"),
}
# Scenarios that do not come to their end without a guard that stops them, so that no record of a bad run is whole.
STUCK = {
    *("operation", "barrier_against_collective", "shape", "root", "pieces", "wrong_group", "extra_call"),
    *("groups_in_different_order", "message_shape", "message_tag", "returns_early", "raises", "killed", "late"),
    *("raises_what_sounds_like_gloo", "many_in_flight"),
    *("ddp_extra_collective", "message_dtype", "coalesced_count", "ddp_other_parameters", "message_bytes"),
    "number_of_dimensions",
}
UNMARKED_IN_RECORD = ["swap_of_equal_signature", "reduce_op", "one_of_three_differs", "root"]


def cases(*, is_twin: bool) -> list[Any]:
    """Return each scenario in one mode without a mark; the other one is slow, or nightly for a fault in mode "step"."""
    unmarked = [(name, "step" if name in UNMARKED_IN_STEP else "strict") for name in SCENARIOS]
    in_strict = [(name, "strict") for name in SCENARIOS if name in UNMARKED_IN_STEP]
    in_step = [(name, "step") for name in SCENARIOS if name not in UNMARKED_IN_STEP]
    return tiers(unmarked, in_strict + in_step) if is_twin else tiers(unmarked, in_strict, in_step)


@pytest.fixture
def pool(request: pytest.FixtureRequest, name: str) -> RankPool:
    ranks: RankPool = request.getfixturevalue("three_ranks" if SCENARIOS[name].ranks == 3 else "two_ranks")
    return ranks


@pytest.mark.parametrize(("name", "mode"), cases(is_twin=True))
def test_legal_twin_is_silent(pool: RankPool, name: str, mode: str) -> None:
    assert {ending.error for ending in pool.run(probe, name, mode, False).values()} == {"silent"}


@pytest.mark.parametrize(("name", "mode"), cases(is_twin=False))
def test_fault_is_named_on_every_rank_in_the_same_words(pool: RankPool, name: str, mode: str) -> None:
    row = SCENARIOS[name]
    text, error_of_rank_1 = row.text, row.rank_1 or row.error
    if mode == "step":
        text = row.in_step or text
    try:
        endings = [outcome.value for outcome in pool.run(probe, name, mode, True)]
    finally:
        if mode == "step" or name.startswith("message"):
            pool.restart()  # they did run, and left gloo in some state
    errors = [DIES if ending is None else ending.error for ending in endings]
    assert errors == [row.error, error_of_rank_1, row.error][: row.ranks], endings
    messages = {ending.message for ending in endings if ending is not None and ending.error == row.error}
    assert len(messages) == 1
    assert text in messages.pop()
    assert max(ending.after_sec for ending in endings if ending is not None) < latest_sec(name)


def recorded() -> list[Any]:
    """Return the scenarios, with the mark nightly where nothing but a legal twin is recorded to its end."""
    marked = [name for name in SCENARIOS if name not in UNMARKED_IN_RECORD]
    whole = [name for name in marked if name not in STUCK]
    return tiers(UNMARKED_IN_RECORD, whole, [name for name in marked if name in STUCK])


@pytest.mark.parametrize("name", recorded())
def test_report_names_the_fault_from_the_records_and_nothing_of_the_legal_twin(
    pool: RankPool, name: str, tmp_path: Path
) -> None:
    pool.run(probe, name, "record", False, str(tmp_path / "legal")).values()
    assert not diagnose(read_records(tmp_path / "legal"))
    if name not in STUCK:
        pool.run(probe, name, "record", True, str(tmp_path / "bad")).values()
        row = SCENARIOS[name]
        assert (row.in_step or row.text) in diagnose(read_records(tmp_path / "bad"))[0].message


def test_error_has_culprits_missing_ranks_and_events_as_attributes(three_ranks: RankPool) -> None:
    for ending in three_ranks.run(probe, "one_of_three_differs", "strict", True).values():
        assert (ending.culprits, ending.missing, ending.events) == ((1,), (), (0, 1, 2))


def test_no_rank_is_blamed_without_a_majority(two_ranks: RankPool) -> None:
    for ending in two_ranks.run(probe, "reduce_op", "strict", True).values():
        assert ending.culprits == ()
        assert "The guard cannot tell which rank is right" in ending.message
