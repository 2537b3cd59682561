"""NaN capture, sentinel and guard in one all_reduce a step: what they say is what they say by their own calls."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats.testing import RankPool
from tests import step_checks_runs as runs
from tests.step_checks_runs import EVERY, Outcome, Plan

SUBSETS = [parts for count in (1, 2, 3) for parts in itertools.combinations(EVERY, count)]


def trained(pool: RankPool, plan: Plan) -> list[Outcome]:
    outcomes: list[Outcome] = pool.run(runs.train, plan).values()
    assert all(one.said == outcomes[0].said for one in outcomes)  # in the same words
    return outcomes


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))  # a NaN, too


def test_a_step_is_one_collective(two_ranks: RankPool, tmp_path: Path) -> None:
    for one in trained(two_ranks, Plan(str(tmp_path))):
        assert one.said == []
        assert one.collectives[1:] == [1, 1, 1]
        assert one.collectives[0] > 1  # connect, and agree on settings
        assert one.compared == one.seen_by_guard


# -- the same verdicts ------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "a NaN": ("nan",),
    "a gradient out of range": ("huge",),
    "a flipped weight": ("flip",),
    "another operation": ("op",),
    "another label": ("label",),
    "a NaN and another label": ("nan", "label"),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("parts", SUBSETS, ids="+".join)
def test_verdicts_are_those_of_the_own_calls(
    two_ranks: RankPool, tmp_path: Path, parts: tuple[str, ...], faults: tuple[str, ...]
) -> None:
    options: dict[str, Any] = {
        "faults": faults,
        "over_the_store": "op" in faults,  # on one host that is seen before the step
        "sentinel": {"mode": 2, "digest_every_steps": 1 if "flip" in faults else 0},
    }
    apart = trained(two_ranks, Plan(str(tmp_path / "apart"), parts, False, **options))
    together = trained(two_ranks, Plan(str(tmp_path / "together"), parts, True, **options))
    assert [one.said for one in together] == [one.said for one in apart]
    assert_heard(parts, faults, together[0])
    for one, other in zip(together, apart, strict=True):
        assert all(same_bits(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))
        assert torch.equal(one.random, other.random)
        assert (one.seen_by_guard, one.compared) == (other.seen_by_guard, other.compared)


def assert_heard(parts: tuple[str, ...], faults: tuple[str, ...], outcome: Outcome) -> None:
    """So that two that say nothing are not taken for two that say the same."""
    heard = [check for step, check, _ in outcome.said if step == runs.FAULTY_STEP]
    if "guard" in parts and {"op", "label"} & set(faults):
        assert heard == ["guard"]
        return
    nan = "nan" in faults
    expected = ["capture"] if nan and "capture" in parts else []
    expected += ["sentinel"] if "sentinel" in parts and (nan or {"huge", "flip"} & set(faults)) else []
    assert heard == expected


def test_where_the_capture_says_skip_the_alarm_is_told_and_not_raised(two_ranks: RankPool, tmp_path: Path) -> None:
    for policy, raised in (("skip", False), ("continue", True)):
        plan = Plan(str(tmp_path / policy), faults=("nan",), capture={"on_nonfinite": policy})
        for one in trained(two_ranks, plan):
            assert one.raised == ([(2, "SentinelAlarm")] if raised else [])
