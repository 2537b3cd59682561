"""`StepChecks` judges a step by one all_reduce, with the verdicts of capture, sentinel and guard by their own calls."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats import ConfigError, NaNCapture, StepChecks, collective_guard
from ddpstats.testing import RankPool, run_ranks
from tests import step_checks_runs as runs
from tests.step_checks_runs import EVERY, Outcome, Plan

SOME = [parts for count in (1, 2) for parts in itertools.combinations(EVERY, count)]
SUBSETS = [EVERY, *(pytest.param(parts, marks=pytest.mark.slow) for parts in SOME)]


def trained(pool: RankPool, plan: Plan) -> list[Outcome]:
    outcomes: list[Outcome] = pool.run(runs.train, plan).values()
    assert all(outcome.reports == outcomes[0].reports for outcome in outcomes)  # in the same words
    return outcomes


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))  # a NaN, too


def test_a_step_is_one_collective(two_ranks: RankPool, tmp_path: Path) -> None:
    for outcome in trained(two_ranks, Plan(str(tmp_path))):
        assert outcome.reports == []
        assert outcome.collectives[1:] == [1, 1, 1]
        assert outcome.collectives[0] > 1  # connect, and agree on settings
        assert outcome.compared == outcome.seen_by_guard


# -- the same verdicts ------------------------------------------------------------------------------------------------

BOTH = "a NaN and another label"
FAULTS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "a NaN": ("nan",),
    "a gradient out of range": ("huge",),
    "a flipped weight": ("flip",),
    "another operation": ("op",),
    "another label": ("label",),
    BOTH: ("nan", "label"),
}


CASES = [
    *((EVERY, fault) for fault in FAULTS),
    *(pytest.param(parts, fault, marks=pytest.mark.slow) for parts in SOME for fault in ("nothing", BOTH)),
]


@pytest.mark.parametrize(("parts", "fault"), CASES, ids=lambda case: case if isinstance(case, str) else "+".join(case))
def test_verdicts_are_those_of_the_own_calls(
    two_ranks: RankPool, tmp_path: Path, parts: tuple[str, ...], fault: str
) -> None:
    faults = FAULTS[fault]
    options: dict[str, Any] = {
        "faults": faults,
        "over_the_store": "op" in faults,  # on one host that is seen before the step
        "sentinel": {"mode": 2, "digest_every_steps": 1 if "flip" in faults else 0},
    }
    apart_outcomes = trained(two_ranks, Plan(str(tmp_path / "apart"), parts, False, **options))
    together = trained(two_ranks, Plan(str(tmp_path / "together"), parts, True, **options))
    assert [outcome.reports for outcome in together] == [outcome.reports for outcome in apart_outcomes]
    assert_reported(parts, faults, together[0])
    for outcome, by_own_calls in zip(together, apart_outcomes, strict=True):
        assert all(same_bits(a, b) for a, b in zip(outcome.parameters, by_own_calls.parameters, strict=True))
        assert torch.equal(outcome.random, by_own_calls.random)
        assert (outcome.seen_by_guard, outcome.compared) == (by_own_calls.seen_by_guard, by_own_calls.compared)


def assert_reported(parts: tuple[str, ...], faults: tuple[str, ...], outcome: Outcome) -> None:
    """Assert that the checks that must see the faults did, so that two silences do not count as equal verdicts."""
    checks_that_reported = [check for step, check, _ in outcome.reports if step == runs.FAULTY_STEP]
    if "guard" in parts and {"op", "label"} & set(faults):
        assert checks_that_reported == ["guard"]
        return
    nan = "nan" in faults
    expected = ["capture"] if nan and "capture" in parts else []
    expected += ["sentinel"] if "sentinel" in parts and (nan or {"huge", "flip"} & set(faults)) else []
    assert checks_that_reported == expected


@pytest.mark.slow
def test_alarm_of_a_step_that_capture_skips_is_a_verdict_and_not_raised(two_ranks: RankPool, tmp_path: Path) -> None:
    for policy, raised in (("skip", False), ("continue", True)):
        plan = Plan(str(tmp_path / policy), faults=("nan",), capture={"on_nonfinite": policy})
        for outcome in trained(two_ranks, plan):
            assert outcome.raised == ([(2, "SentinelAlarm")] if raised else [])


def test_digests_of_replicas_are_compared_in_their_steps(two_ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), sentinel={"mode": 2, "digest_every_steps": 3}, steps=7)
    for outcome in trained(two_ranks, plan):
        assert outcome.reports == []
        assert [count == 1 for count in outcome.collectives[1:]] == [True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("guard", "faults"),
    [
        ({"mode": "strict"}, ("nan",)),
        *(
            pytest.param(guard, faults, marks=pytest.mark.slow)
            for guard in ({"mode": "step", "check_every": 2}, {"mode": "record"}, {"mode": "off"})
            for faults in ((), ("nan",))
        ),
    ],
)
def test_guard_of_any_mode_sees_and_compares_as_by_its_own_call(
    two_ranks: RankPool, tmp_path: Path, guard: dict[str, Any], faults: tuple[str, ...]
) -> None:
    guard = {**guard, "record_dir": str(tmp_path)}
    options: dict[str, Any] = {"guard": guard, "faults": faults, "micro_batches": 3}
    apart = trained(two_ranks, Plan(str(tmp_path / "apart"), together=False, **options))
    together = trained(two_ranks, Plan(str(tmp_path / "together"), **options))
    for outcome, by_own_calls in zip(together, apart, strict=True):
        assert outcome.reports == by_own_calls.reports
        assert (outcome.seen_by_guard, outcome.compared) == (by_own_calls.seen_by_guard, by_own_calls.compared)
        assert outcome.collectives[1:2] == [1]


@pytest.mark.parametrize("parts", SUBSETS, ids="+".join)
def test_nothing_more_is_computed_or_read_than_by_the_own_calls(
    two_ranks: RankPool, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    """On whatever device: no operator, so no number that is read from one."""
    (together, ours), _ = two_ranks.run(runs.operators, str(tmp_path), parts, True).values()
    (apart, _), _ = two_ranks.run(runs.operators, str(tmp_path), parts, False).values()
    assert together == apart
    assert ours == ["c10d.allreduce_.default"]
    assert ("aten._local_scalar_dense.default" in together) == ("capture" in parts)


@pytest.mark.slow
def test_own_calls_may_alternate_with_the_common_one(two_ranks: RankPool, tmp_path: Path) -> None:
    for ok, numbers, collectives, compared in two_ranks.run(runs.alternating, str(tmp_path)).values():
        assert ok
        assert numbers == [step for step in range(8) for _ in range(2)]
        assert collectives == compared


@pytest.mark.slow
def test_verdicts_under_a_grad_scaler_are_those_of_the_own_calls(two_ranks: RankPool, tmp_path: Path) -> None:
    together = two_ranks.run(runs.scaled, str(tmp_path), True).values()
    apart = two_ranks.run(runs.scaled, str(tmp_path), False).values()
    verdicts = [(kind, ok) for kind, ok, _ in together[0]]
    assert together[0] == together[1]
    assert verdicts == [(kind, ok) for kind, ok, _ in apart[0]]
    assert verdicts[0] == ("scaler_skip", True)
    assert verdicts[-1] == ("ok", True)
    assert together[0][-1][2] == 1


def test_step_checks_work_without_a_process_group(tmp_path: Path) -> None:
    outcome = runs.train(Plan(str(tmp_path), wrap="alone", faults=("nan",)))
    assert outcome.reports == []
    assert outcome.collectives == [0] * 4
    with collective_guard("step") as guard, NaNCapture(tmp_path, model=torch.nn.Linear(1, 1)) as capture:
        checks = StepChecks(capture=capture, guard=guard)
        with pytest.raises(ConfigError, match=r"NaNCapture.check\(\) inside micro_batch\(\)"), capture.micro_batch(1):
            checks.step()
        with pytest.raises(ConfigError, match=r"check\(step=-1\): a whole number"):
            checks.step(step=-1)
        verdict = checks.step(step=7).capture
        assert verdict is not None
        assert verdict.step == 7


# -- ranks that do not do the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "lines"),
    [
        (
            "another part",
            "ProtocolMismatch",
            ["rank 0: StepChecks.step() of NaNCapture, Sentinel", "rank 1: StepChecks.step() of NaNCapture"],
        ),
        ("its own call", "ProtocolMismatch", ["rank 0: StepChecks.step() of NaNCapture", "rank 1: NaNCapture.check()"]),
        ("another number of calls", "ProtocolMismatch", ["rank 1: reduce_stats, without a name"]),
        (
            "inside of a micro-batch",
            "InvalidStats",
            [
                "StepChecks.step() of NaNCapture, Sentinel cannot judge the step",
                "rank 1: ConfigError: NaNCapture.check()",
            ],
        ),
        ("closed", "InvalidStats", ["rank 1: ConfigError: Sentinel.step() after close()"]),
        ("a gradient that cannot be read", "InvalidStats", ["rank 1: ZeroDivisionError: not this one"]),
    ],
)
def test_ranks_that_do_something_else_are_named_on_all(
    two_ranks: RankPool, tmp_path: Path, how: str, error: str, lines: list[str]
) -> None:
    first, second = two_ranks.run(runs.unlike, str(tmp_path), how).values()
    assert first == second
    (kind, text), is_judged_again = first
    assert kind == error
    assert all(line in text for line in lines), text
    assert is_judged_again


@pytest.mark.slow
def test_a_rank_that_raises_in_its_micro_batch_is_named_by_the_others(two_ranks: RankPool, tmp_path: Path) -> None:
    (kind, text), second = two_ranks.run(runs.raises_in_its_micro_batch, str(tmp_path)).values()
    two_ranks.restart()
    assert kind == "RankMissing"
    assert "rank 1 raised in step 1, micro-batch 0: ValueError: label 17 of 3" in text
    assert second == ("ValueError", "label 17 of 3")


def test_settings_that_differ_are_named_at_the_first_step(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.other_settings, str(tmp_path)).values()
    assert first == second
    assert first[0] == "ConfigError"
    assert "rank 0: keep=1\n  rank 1: keep=2" in first[1]


def test_guards_of_different_modes(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(runs.another_mode).values()
    assert first == second
    assert first[0] == "ProtocolMismatch"
    assert "rank 0: StepChecks.step() of collective_guard('strict')" in first[1]


def test_labels_of_a_step_without_an_answer_are_compared_by_the_next_call(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.labels_of_a_step_without_an_answer, str(tmp_path)).values()
    assert first == second
    assert [kind for kind, _ in first] == ["InvalidStats", "CollectiveMismatch"]
    assert "'b'" in first[1][1]


@pytest.mark.slow
def test_a_mismatch_in_a_group_of_some_is_raised_on_all(three_ranks: RankPool) -> None:
    outcomes = three_ranks.run(runs.in_a_group_of_some, "label").values()
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [kind for kind, _ in outcomes[0]] == ["nothing", "CollectiveMismatch", "CollectiveMismatch"]
    assert "of ranks 0, 1 do not run the same collective" in outcomes[0][1][1]
    assert [kind for kind, _ in three_ranks.run(runs.in_a_group_of_some, "nothing").values()[2]] == ["nothing"] * 3


@pytest.mark.slow
def test_collective_that_only_some_ranks_issued_is_rank_missing_on_all(three_ranks: RankPool) -> None:
    outcomes = three_ranks.run(runs.in_a_group_of_some, "missing").values()
    three_ranks.restart()
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [kind for kind, _ in outcomes[0]] == ["nothing", "RankMissing", "RankMissing"]
    assert "rank 1" in outcomes[0][1][1]


def test_rank_that_compares_nothing_gets_the_whole_error_of_the_others(tmp_path: Path) -> None:
    first, second, third = run_ranks(runs.known_to_others, 3, str(tmp_path / "meet"), timeout_sec=60).values()
    assert third == first == second
    assert (third["seq"], third["ranks"]) == (1, (0, 1))
    assert third["by_rank"].keys() == {0, 1}
    assert third["group"]


def test_mismatch_with_warn_is_logged_once_and_steps_go_on(two_ranks: RankPool, tmp_path: Path) -> None:
    for warnings, collectives, compared in two_ranks.run(runs.warned, str(tmp_path)).values():
        assert len(warnings) == 1
        assert "the label" in warnings[0]
        assert [count == 1 for count in collectives[1:]] == [True, False, True, True, True]
        assert compared > 0


@pytest.mark.slow
def test_shortest_timeout_of_the_parts_holds(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.comes_late, tmp_path / "gave up").values()
    two_ranks.restart()
    assert first[0] == second[0] == "RankMissing"
    assert first[1] < 2 * 2 + 5


def test_what_cannot_be_one_all_reduce_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    groups, guard, kind, none = two_ranks.run(runs.refused, str(tmp_path)).values()[0]
    assert {error[0] for error in (groups, guard, kind, none)} == {"ConfigError"}
    assert "Give both the same group=" in groups[1]
    assert "call guard.step() on every rank" in guard[1]
    assert "a ddpstats.NaNCapture is needed, not a Sentinel" in kind[1]
    assert "pass at least one of capture=, sentinel= and guard=" in none[1]
