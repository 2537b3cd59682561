"""Which rank is named where one has failed, and others only have not come yet, or left because of it."""

from __future__ import annotations

import sys

import pytest

from ddpstats._base.config import GuardMode
from ddpstats.guard._diagnosis import find
from ddpstats.guard._events import Event, Signature, digest_of
from ddpstats.guard._status import LEFT, MISSING, RankStatus
from ddpstats.testing import run_ranks
from tests.guard import missing_runs as runs

SIGNATURE = Signature("all_reduce", "sum", None, ((1,),), ("float32",))
FAILED, GONE = f"{LEFT} by KeyboardInterrupt", f"{LEFT} by RankMissing: rank 3"


def status(rank: int, count: int, waits: int | None = None, **given: object) -> RankStatus:
    """Of a rank that began so many collectives, and waits in that one."""
    events = [Event("0", seq, SIGNATURE, None, 0, "train.py:3", digest_of(SIGNATURE)) for seq in range(1, count + 1)]
    return RankStatus(rank, events, {}, count, None if waits is None else ("0", waits), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([status(1, 4), status(2, 4), status(3, 4, left=FAILED)], (3,)),
        ([status(1, 5, 5), status(2, 4), status(3, 5, dead=True)], (3,)),
        ([status(1, 4, left=GONE, missed=(3,)), status(2, 4), status(3, 4, left=FAILED)], (3,)),
        ([status(1, 4, left=GONE, missed=(3,)), status(2, 4), status(3, 4)], (3,)),
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
def test_who_failed_is_named(others: list[RankStatus], named: tuple[int, ...]) -> None:
    """Rank 0 waits in number 5."""
    found = find("0", "the default group", [status(0, 5, 5), *others], until=5)
    assert found is not None
    assert (found.kind, found.missing) == (MISSING, named), found.message
    assert found.seq == (4 if any(one.left == LEFT for one in others) else 5)
    assert ("ran no Python for 7 s" in found.message) == any(one.slept_sec and one.rank in named for one in others)


@pytest.mark.parametrize("stack", [None, "train.py:7 in load"])
def test_a_rank_that_told_nothing_is_missing_where_the_others_wait(stack: str | None) -> None:
    """Not where it began: only a rank that answers with none has issued none. What its watchdog wrote is old."""
    gone = RankStatus(1, last="number 2 of group '0'", dead=stack is None, stack=stack)
    found = find("0", "the default group", [status(0, 5, 5), gone], until=5)
    assert found is not None
    assert (found.seq, found.missing) == (5 if stack is None else 1, (1,))
    assert ("number 2 of group" in found.message) == (stack is not None)


def test_nobody_is_missing_where_only_labels_differ_and_ranks_have_as_many_in_flight_as_they_like() -> None:
    assert find("0", "the default group", [status(0, 6), status(1, 2)], in_doubt=True) is None
    found = find("0", "the default group", [status(0, 6), status(1, 2)])
    assert found is not None
    assert found.missing == (1,)


@pytest.mark.parametrize(("at_end", "missing"), [(False, (1,)), (True, (2,))])
def test_a_rank_that_came_to_its_end_did_not_come_to_a_collective(at_end: bool, missing: tuple[int, ...]) -> None:
    others = [status(0, 4, 5, left=LEFT), status(2, 3)] if at_end else [status(0, 5, 5), status(2, 5, 5)]
    statuses = [others[0], status(1, 4, 5, left=LEFT), others[1]]
    found = find("0", "the default group", statuses, until=5)
    assert found is not None
    assert found.missing == missing


@pytest.mark.parametrize("rank_2", ["leaves", "stays"])
def test_who_left_because_of_another_rank_is_not_named(rank_2: str) -> None:
    (_, named), (text, missing), _ = run_ranks(runs.interrupted, 3, "leaves", rank_2, timeout_sec=60).values()
    assert named == missing == (2,)
    assert "rank 2: left in the middle of it (KeyboardInterrupt)" in text


def test_who_has_not_come_yet_is_not_named_where_another_rank_failed() -> None:
    first, second, _ = run_ranks(runs.interrupted, 3, "comes later", "leaves", timeout_sec=60).values()
    assert first == second
    assert first[1] == (2,)
    assert f"rank 2: {FAILED}" in first[0]


@pytest.mark.skipif(sys.platform != "linux", reason="signals as on Linux")
@pytest.mark.parametrize(("seconds", "in_look", "least_sec"), [(3.0, False, 2.0), (6.0, True, 2.0)])
def test_a_process_that_was_stopped_knows_for_how_long(seconds: float, in_look: bool, least_sec: float) -> None:
    """In a look of the watchdog's it may have been waiting for the store, for some seconds of these."""
    ((before_sec, after_sec),) = run_ranks(runs.stopped, 1, seconds, in_look, timeout_sec=60).values()
    assert before_sec == 0.0
    assert least_sec < after_sec < 4 * seconds


@pytest.mark.parametrize("mode", ["strict", "step"])
def test_a_group_that_waits_for_longer_is_waited_for_where_no_timeout_is_named(mode: GuardMode) -> None:
    assert run_ranks(runs.slow, 2, mode, None, timeout_sec=60).values() == ["nothing"] * 2
    for said in run_ranks(runs.slow, 2, mode, 2.0, timeout_sec=60).values():
        assert "rank 0: did not come" in said
