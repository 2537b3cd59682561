"""Every scenario and its legal twin, in every mode, on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats.guard._records import read_records
from ddpstats.guard._report import diagnose
from ddpstats.testing import RankPool
from tests.guard.scenarios import SCENARIOS, Row, Told, probe

# What rank 1 itself ends with, where it is the one that is missing.
_OWN_END = {"raises": "other: ZeroDivisionError", "raises_what_sounds_like_gloo": "other: RuntimeError"}
_DIES = {"killed"}
# Scenarios that go through to their end without a guard that stops them, so that a record can be read afterwards.
_RUN_THROUGH = [
    name
    for name in SCENARIOS
    if name
    not in {
        *("operation", "barrier_against_collective", "shape", "root", "pieces", "wrong_group", "extra_call"),
        *("groups_in_different_order", "message_shape", "message_tag", "returns_early", "raises", "killed", "late"),
        *("raises_what_sounds_like_gloo", "many_in_flight"),
        *("ddp_extra_collective", "message_dtype", "coalesced_count", "ddp_other_parameters", "message_bytes"),
    }
]


@pytest.fixture
def pool(request: pytest.FixtureRequest, name: str) -> RankPool:
    found: RankPool = request.getfixturevalue("three_ranks" if SCENARIOS[name].ranks == 3 else "two_ranks")
    return found


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_legal_twin_is_silent(pool: RankPool, name: str, mode: str) -> None:
    assert {told.error for told in pool.run(probe, name, mode, False).values()} == {"silent"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_strict_raises_before_anything_moves(pool: RankPool, name: str) -> None:
    _check_bad(pool, name, "strict", SCENARIOS[name].strict, SCENARIOS[name].text)


@pytest.mark.parametrize("name", SCENARIOS)
def test_step_raises_at_the_next_step(pool: RankPool, name: str) -> None:
    row = SCENARIOS[name]
    try:
        _check_bad(pool, name, "step", row.step, row.in_step or row.text)
    finally:
        pool.restart()  # the collectives did run, and left gloo in whatever state


def _check_bad(pool: RankPool, name: str, mode: str, expected: str, text: str) -> None:
    outcomes = pool.run(probe, name, mode, True)
    told: list[Told] = [outcome.value for outcome in outcomes if outcome.value is not None]
    if expected == "abort":
        assert len(told) < len(outcomes), "gloo did not abort"
        return
    if expected == "some":
        assert any(one.error in ("CollectiveMismatch", "RankMissing") and text in one.message for one in told)
        return
    if name in _DIES:
        assert len(told) == len(outcomes) - 1
    elif name in _OWN_END:
        assert told.pop().error == _OWN_END[name]
    else:
        assert len(told) == len(outcomes)
    assert {one.error for one in told} == {expected}
    assert len({one.message for one in told}) == 1, "ranks were told different things"
    assert expected == "silent" or text in told[0].message


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in _RUN_THROUGH])
def test_report_finds_nothing_in_the_records_of_a_legal_twin(pool: RankPool, name: str, tmp_path: Path) -> None:
    pool.run(probe, name, "record", False, str(tmp_path)).values()
    assert not diagnose(read_records(tmp_path))


@pytest.mark.parametrize("name", _RUN_THROUGH)
def test_report_finds_in_the_records_what_the_guard_would_have_said(pool: RankPool, name: str, tmp_path: Path) -> None:
    row: Row = SCENARIOS[name]
    for bad in (False, True):
        directory = tmp_path / str(bad)
        pool.run(probe, name, "record", bad, str(directory)).values()
        findings = diagnose(read_records(directory))
        assert bool(findings) == bad
        if bad:
            said = findings[0].message
            assert row.text in said or (row.in_step and row.in_step in said) or "the label" in said


def test_the_error_says_who_and_what_in_attributes(three_ranks: RankPool) -> None:
    for told in three_ranks.run(probe, "one_of_three_differs", "strict", True).values():
        assert told.culprits == (1,)
        assert told.events == (0, 1, 2)
        assert told.missing == ()


def test_without_a_majority_nobody_is_blamed(two_ranks: RankPool) -> None:
    for told in two_ranks.run(probe, "reduce_op", "strict", True).values():
        assert told.culprits == ()
        assert "Nothing here tells which rank is right" in told.message


def test_the_documents_count_these_scenarios() -> None:
    root = Path(__file__).parents[2]
    page = " ".join((root / "docs" / "guard.md").read_text().split())
    assert f"has {len(SCENARIOS)} faulty programs, each beside a legal twin" in page
    silent = [name for name, row in SCENARIOS.items() if row.strict == "silent"]
    assert silent == []
    assert f'Mode "strict" names the fault in all {len(SCENARIOS)}' in page
