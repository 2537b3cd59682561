"""`RankMissing` names the rank that failed, and not those that have not come yet or left because of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats._base import config
from ddpstats._ranks.comm import GlooComm
from ddpstats._ranks.failure import Membership
from ddpstats._ranks.store import bounded
from ddpstats.guard.diagnosis import LEFT, MISMATCH, MISSING, NOTHING, Alarm, RankStatus, find
from ddpstats.guard.event import Event, Signature, digest_of
from ddpstats.guard.failure_agreement import FailureAgreement
from ddpstats.guard.group import GuardMode
from ddpstats.testing import run_ranks
from tests.guard.tiers import tiers

# -- what runs on the ranks -------------------------------------------------------------------------------------------


AFTERWARDS_SEC = 2.0


def interrupted(rank_2: str) -> tuple[str, tuple[int, ...]]:
    """Return the last error that this rank gets, and the ranks that it calls missing.

    Rank 1 leaves the guard by the error of the reduction, and rank 0 issues one more collective under the guard. Rank 2
    "leaves" the guard by its interrupt, or "stays" in it.
    """
    rank = dist.get_rank()
    try:
        with ddpstats.collective_guard("step", timeout_sec=30):
            dist.all_reduce(torch.ones(1))
            ddpstats.reduce_stats({"loss": 1.0})
            try:
                _reduce(interrupted=rank == 2)
            except (ddpstats.RankMissing, KeyboardInterrupt):
                if rank == 1 or (rank, rank_2) == (2, "leaves"):
                    raise
            time.sleep(AFTERWARDS_SEC * (1 + rank))
            if rank != 2:
                dist.all_reduce(torch.ones(1))
    except ddpstats.RankMissing as error:
        return str(error), error.missing_ranks
    except KeyboardInterrupt:
        pass
    return "nothing", ()


def _reduce(interrupted: bool) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with mock.patch.object(GlooComm, "all_reduce", interrupt if interrupted else GlooComm.all_reduce):
        ddpstats.reduce_stats({"loss": 1.0})


def stopped(seconds: float, in_look: bool) -> tuple[float, float]:
    """Return how long this process knows that it ran no Python, before and after a stop, or one ``in_look``."""
    is_over = threading.Event()

    def stop() -> str:
        with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        is_over.set()
        return ""

    members = Membership(bounded(HashStore()), 0, range(2))
    own: Any = SimpleNamespace(position=lambda: stop() if in_look and not is_over.is_set() else "")
    agreement = FailureAgreement(members, own, lambda name, rank: [], lambda: True)
    before_sec = agreement.slept_sec()
    if not in_look:
        stop()
    is_over.wait()
    after_sec = agreement.slept_sec()
    agreement.close()
    return before_sec, after_sec


def slow(mode: GuardMode, timeout_sec: float | None) -> str:
    """Return the error where rank 0 comes late to a group that waits for a minute, and others for 2 s.

    It comes 4 s late, or with a timeout once rank 1 has given up.
    """
    with mock.patch.object(config, "DEFAULT_TIMEOUT_SEC", 2.0):
        guard = ddpstats.collective_guard(mode, timeout_sec=timeout_sec)
    group, store = dist.new_group(timeout=timedelta(minutes=1)), dist.distributed_c10d._get_default_store()
    try:
        with guard:
            for asynchronous in (False, True):
                if dist.get_rank() == 0 and timeout_sec is None:
                    time.sleep(4.0)
                elif dist.get_rank() == 0:
                    store.wait(["given up"])
                work = dist.all_reduce(torch.ones(1), group=group, async_op=asynchronous)
                if work is not None:
                    work.wait()
    except ddpstats.RankMissing as error:
        store.set("given up", "")
        return str(error)
    return "nothing"


def waited_for_later(mode: GuardMode) -> tuple[int, ...]:
    """Return who is missing from a collective that failed before this rank issued another one, and waited for it."""
    pair, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    with ddpstats.collective_guard(mode, timeout_sec=10):
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 2:
            store.wait(["rank 0 has gone on", "rank 1 has gone on"])
            os._exit(0)
        store.set(f"rank {dist.get_rank()} has gone on", "")
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        until = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.05)
        dist.barrier(group=pair)
        with pytest.raises(ddpstats.RankMissing) as caught:
            work.wait()
    return caught.value.missing_ranks


def waited_for_by_its_future(mode: GuardMode) -> tuple[int, ...]:
    """Return who is missing from a blocking collective of the group object, which no `Work.wait` waits for."""
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    assert group is not None
    options = dist.AllreduceOptions()
    options.asyncOp = False
    with ddpstats.collective_guard(mode, timeout_sec=2):
        if dist.get_rank() == 1:
            store.wait(["has raised"])
            return ()  # raises, too: the verdict is that of all ranks
        with pytest.raises(ddpstats.RankMissing) as caught:
            group.allreduce([torch.ones(1)], options).get_future().wait()
        store.set("has raised", "")
    return caught.value.missing_ranks


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_rank_is_named_by_a_late_wait_and_by_a_future(mode: GuardMode) -> None:
    survivors = list(run_ranks(waited_for_later, 3, mode, timeout_sec=40))[:2]
    assert [survivor.value for survivor in survivors] == [(2,), (2,)]
    waiting, absent = run_ranks(waited_for_by_its_future, 2, mode, timeout_sec=40)
    assert (waiting.value, type(absent.error)) == ((1,), ddpstats.RankMissing)


SIGNATURE = Signature("all_reduce", "sum", None, ((1,),), ("float32",))
IN_TIME = Alarm("0", "the default group", tuple(range(4)), 5, overdue=False)
OVERDUE = replace(IN_TIME, overdue=True)
FAILED, GONE = f"{LEFT} by KeyboardInterrupt", f"{LEFT} by RankMissing: rank 3"


def status(rank: int, count: int, waits: int | None = None, **fields: object) -> RankStatus:
    """Return the status of a rank that began so many collectives, and waits in one of them."""
    events = [Event("0", seq, SIGNATURE, None, 0, "train.py:3", digest_of(SIGNATURE)) for seq in range(1, count + 1)]
    return RankStatus(rank, events, count, None if waits is None else ("0", waits), **fields)  # type: ignore[arg-type]


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
    finding = find(OVERDUE, [status(0, 5, 5), *others])
    assert finding is not None
    assert (finding.kind, finding.missing) == (MISSING, named), finding.message
    assert finding.seq == (4 if any(status_of_other.left == LEFT for status_of_other in others) else 5)
    has_slept = any(status_of_other.slept_sec and status_of_other.rank in named for status_of_other in others)
    assert ("ran no Python for 7 s" in finding.message) == has_slept


def test_a_rank_that_waits_in_another_group_may_have_skipped_the_call_or_have_the_groups_in_another_order() -> None:
    """Both leave the same traces: rank 1 would come to the call later, or never."""
    elsewhere = replace(status(1, 4), waits_in=("1", 7, "group 'mesh_tp' of ranks 0, 1"))
    finding = find(OVERDUE, [status(0, 5, 5), elsewhere])
    assert finding is not None
    assert finding.kind == MISMATCH
    assert "a rank skipped a call, or the order is swapped between groups" in finding.message
    assert (
        "  rank 1: waits in number 7 of group 'mesh_tp' of ranks 0, 1; no collective of it is known\n"
        in finding.message
    )
    last = "number 7 of group 'mesh_tp' of ranks 0, 1, all_reduce(float32[1], sum), at train.py:3"
    finding = find(OVERDUE, [status(0, 5, 5), replace(elsewhere, last=last)])
    assert finding is not None
    assert f"  rank 1: waits in {last}\n" in finding.message


def test_a_rank_that_compares_behind_its_last_collective_is_where_its_stack_says() -> None:
    """As in `guard.step()`, after a collective that this rank skipped."""
    last = "number 4 of the default group of 2 ranks, all_reduce(float32[1], sum), at train.py:3"
    behind = status(1, 4, 4, last=last, stack="train.py:9 in main")
    finding = find(OVERDUE, [status(0, 5, 5), behind])
    assert finding is not None
    assert finding.missing == (1,)
    assert f"  rank 1: waits for the other ranks; its last known collective was {last}\n" in finding.message
    assert "\n      train.py:9 in main\n" in finding.message


@pytest.mark.parametrize("stack", [None, "train.py:7 in load"])
def test_rank_without_a_status_is_missing_where_the_others_wait(stack: str | None) -> None:
    gone = RankStatus(1, last="number 2 of the default group", dead=stack is None, stack=stack)
    finding = find(OVERDUE, [status(0, 5, 5), gone])
    assert finding is not None
    assert (finding.seq, finding.missing) == (5 if stack is None else 1, (1,))
    assert ("number 2 of the default group" in finding.message) == (stack is not None)


def test_no_rank_is_missing_where_only_labels_differ() -> None:
    finding = find(replace(IN_TIME, tentative=True), [status(0, 6), status(1, 2)])
    assert finding is not None
    assert finding.kind == NOTHING
    finding = find(IN_TIME, [status(0, 6), status(1, 2)])
    assert finding is not None
    assert finding.missing == (1,)


@pytest.mark.parametrize(("at_end", "missing"), [(False, (1,)), (True, (2,))])
def test_rank_that_came_to_its_end_is_missing_in_a_later_collective(at_end: bool, missing: tuple[int, ...]) -> None:
    others = [status(0, 4, 5, left=LEFT), status(2, 3)] if at_end else [status(0, 5, 5), status(2, 5, 5)]
    statuses = [others[0], status(1, 4, 5, left=LEFT), others[1]]
    finding = find(OVERDUE, statuses)
    assert finding is not None
    assert finding.missing == missing


@pytest.mark.parametrize("rank_2", tiers(["leaves"], ["stays"]))
def test_rank_that_left_because_of_another_is_not_named(rank_2: str) -> None:
    (_, named), (text, missing), _ = run_ranks(interrupted, 3, rank_2, timeout_sec=60).values()
    assert named == missing == (2,)
    assert "rank 2: left in the middle of it (KeyboardInterrupt)" in text


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "in_look"), [(3.0, False), (6.0, True)])
def test_stopped_process_knows_for_how_long_it_was_stopped(seconds: float, in_look: bool) -> None:
    """While it looked it may have been waiting for the store, for some seconds of these."""
    ((before_sec, after_sec),) = run_ranks(stopped, 1, seconds, in_look, timeout_sec=60).values()
    assert before_sec == 0.0
    assert 2.0 < after_sec < 4 * seconds


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_limit_is_the_process_groups_where_no_timeout_is_given(mode: GuardMode) -> None:
    assert run_ranks(slow, 2, mode, None, timeout_sec=60).values() == ["nothing"] * 2
    for message in run_ranks(slow, 2, mode, 2.0, timeout_sec=60).values():
        assert "rank 0: did not take part" in message
