"""`RankMissing` names the rank that failed, and not those that have not come yet or left because of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpstats.guard.diagnosis import LEFT, MISMATCH, MISSING, NOTHING, RankStatus, find
from ddpstats.guard.event import Event, Signature, digest_of
from ddpstats.guard.group import GuardMode
from ddpstats.testing import run_ranks
from tests.guard import missing_runs as runs
from tests.guard.tiers import tiers

SIGNATURE = Signature("all_reduce", "sum", None, ((1,),), ("float32",))
FAILED, GONE = f"{LEFT} by KeyboardInterrupt", f"{LEFT} by RankMissing: rank 3"


def status(rank: int, count: int, waits: int | None = None, **given: object) -> RankStatus:
    """Return the status of a rank that began so many collectives, and waits in one of them."""
    events = [Event("0", seq, SIGNATURE, None, 0, "train.py:3", digest_of(SIGNATURE)) for seq in range(1, count + 1)]
    return RankStatus(rank, events, count, None if waits is None else ("0", waits), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([status(1, 4), status(2, 4), status(3, 4, left=FAILED)], (3,)),
        ([status(1, 5, 5), status(2, 4), status(3, 5, dead=True)], (3,)),
        ([status(1, 4, left=GONE), status(2, 4), status(3, 4, left=FAILED)], (3,)),
        ([status(1, 4, left=GONE), status(2, 5, 5), status(3, 4)], (3,)),
        ([status(1, 4), status(2, 5, 5), status(3, 3, left=LEFT)], (1, 3)),
        ([status(1, 5, 5), status(2, 4), status(3, 5, left=FAILED)], (2,)),
        ([status(1, 5, 5), status(2, 6, 6), status(3, 6, 6, slept_sec=7.2)], (3,)),
        ([status(1, 5, 5), status(2, 5), status(3, 5, 5, slept_sec=7.2)], (3,)),
        ([status(1, 5, 5), status(2, 4), status(3, 5, 5, slept_sec=7.2)], (2,)),
    ],
    ids=[
        "others have not come yet",
        "one died in it",
        "one left because of another",
        "one left because of another that is still there",
        "one is through without it",
        "one failed after it",
        "one did not run, and the first go on",
        "one did not run",
        "one did not run, and another did not come",
    ],
)
def test_rank_that_failed_is_named(others: list[RankStatus], named: tuple[int, ...]) -> None:
    """Rank 0 waits in number 5."""
    finding = find("0", "the default group", [status(0, 5, 5), *others], overdue=5)
    assert finding is not None
    assert (finding.kind, finding.missing) == (MISSING, named), finding.message
    assert finding.seq == (4 if any(other.left == LEFT for other in others) else 5)
    has_slept = any(other.slept_sec and other.rank in named for other in others)
    assert ("ran no Python for 7 s" in finding.message) == has_slept


def test_a_rank_that_waits_in_another_group_may_have_skipped_the_call_or_have_the_groups_in_another_order() -> None:
    """Both leave the same traces: rank 1 would come to the call later, or never."""
    other = replace(status(1, 4), waits_in=("1", 7, "group 'mesh_tp' of ranks 0, 1"))
    finding = find("0", "the default group", [status(0, 5, 5), other], overdue=5)
    assert finding is not None
    assert finding.kind == MISMATCH
    assert "a rank skipped a call, or the order is swapped between groups" in finding.message
    assert (
        "  rank 1: waits in number 7 of group 'mesh_tp' of ranks 0, 1; no collective of it is known\n"
        in finding.message
    )
    last = "number 7 of group 'mesh_tp' of ranks 0, 1, all_reduce(float32[1], sum), at train.py:3"
    finding = find("0", "the default group", [status(0, 5, 5), replace(other, last=last)], overdue=5)
    assert finding is not None
    assert f"  rank 1: waits in {last}\n" in finding.message


def test_a_rank_that_compares_behind_its_last_collective_is_where_its_stack_says() -> None:
    """As in `guard.step()`, after a collective that this rank skipped."""
    last = "number 4 of the default group of 2 ranks, all_reduce(float32[1], sum), at train.py:3"
    other = status(1, 4, 4, last=last, stack="train.py:9 in main")
    finding = find("0", "the default group", [status(0, 5, 5), other], overdue=5)
    assert finding is not None
    assert finding.missing == (1,)
    assert f"  rank 1: waits for the other ranks; its last known collective was {last}\n" in finding.message
    assert "\n      train.py:9 in main\n" in finding.message


@pytest.mark.parametrize("stack", [None, "train.py:7 in load"])
def test_rank_without_a_status_is_missing_where_the_others_wait(stack: str | None) -> None:
    gone = RankStatus(1, last="number 2 of the default group", dead=stack is None, stack=stack)
    finding = find("0", "the default group", [status(0, 5, 5), gone], overdue=5)
    assert finding is not None
    assert (finding.seq, finding.missing) == (5 if stack is None else 1, (1,))
    assert ("number 2 of the default group" in finding.message) == (stack is not None)


def test_no_rank_is_missing_where_only_labels_differ() -> None:
    finding = find("0", "the default group", [status(0, 6), status(1, 2)], tentative=True)
    assert finding is not None
    assert finding.kind == NOTHING
    finding = find("0", "the default group", [status(0, 6), status(1, 2)])
    assert finding is not None
    assert finding.missing == (1,)


@pytest.mark.parametrize(("at_end", "missing"), [(False, (1,)), (True, (2,))])
def test_rank_that_came_to_its_end_is_missing_in_a_later_collective(at_end: bool, missing: tuple[int, ...]) -> None:
    others = [status(0, 4, 5, left=LEFT), status(2, 3)] if at_end else [status(0, 5, 5), status(2, 5, 5)]
    statuses = [others[0], status(1, 4, 5, left=LEFT), others[1]]
    finding = find("0", "the default group", statuses, overdue=5)
    assert finding is not None
    assert finding.missing == missing


@pytest.mark.parametrize("rank_2", tiers(["leaves"], ["stays"]))
def test_rank_that_left_because_of_another_is_not_named(rank_2: str) -> None:
    (_, named), (text, missing), _ = run_ranks(runs.interrupted, 3, "leaves", rank_2, timeout_sec=60).values()
    assert named == missing == (2,)
    assert "rank 2: left in the middle of it (KeyboardInterrupt)" in text


@pytest.mark.slow
def test_rank_that_has_not_come_yet_is_not_named_where_another_failed() -> None:
    first, second, _ = run_ranks(runs.interrupted, 3, "comes later", "leaves", timeout_sec=60).values()
    assert first == second
    assert first[1] == (2,)
    assert f"rank 2: {FAILED}" in first[0]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "in_look"), [(3.0, False), (6.0, True)])
def test_stopped_process_knows_for_how_long_it_was_stopped(seconds: float, in_look: bool) -> None:
    """While it looked it may have been waiting for the store, for some seconds of these."""
    ((before_sec, after_sec),) = run_ranks(runs.stopped, 1, seconds, in_look, timeout_sec=60).values()
    assert before_sec == 0.0
    assert 2.0 < after_sec < 4 * seconds


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_limit_is_the_process_groups_where_no_timeout_is_given(mode: GuardMode) -> None:
    assert run_ranks(runs.slow, 2, mode, None, timeout_sec=60).values() == ["nothing"] * 2
    for message in run_ranks(runs.slow, 2, mode, 2.0, timeout_sec=60).values():
        assert "rank 0: did not take part" in message
