"""A rank that dies, never calls, comes late or leaves is the same `RankMissing` on every living rank, in time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from ddpstats import StatsReducer, any_rank
from ddpstats._ranks import calls, comm, grid
from ddpstats.errors import RankMissing
from ddpstats.testing import RankDied, RankOutcomes, RankPool, die, run_ranks, run_threads
from ddpstats.testing.threads import ThreadGroup
from tests.guard.tiers import tiers
from tests.programs import Program
from tests.ranks.clock import Clock, LonelyGroup
from tests.ranks.processes import LINUX, id_of, wait_until_ended

LIMIT_SEC = 100.0
LONG_SEC = 40.0  # a timeout that a test never lives to see
SHORT_SEC = 2.0  # one that passes while the test waits
LATEST_SEC = 2 * SHORT_SEC + 5.0
AT_ONCE_SEC = 5.0  # of what waits for no rank


class Missed(NamedTuple):
    """A `RankMissing` that a reduction raised, and the seconds until then."""

    text: str
    missing: tuple[int, ...]
    ranks: tuple[int, ...]
    after_sec: float


def attempt(reduce: Any, *args: Any, **kwargs: Any) -> Missed:
    started = time.monotonic()
    try:
        reduce(*args, **kwargs)
    except RankMissing as error:
        return Missed(str(error), error.missing_ranks, error.ranks, time.monotonic() - started)
    raise AssertionError("nothing was raised")


def agreed(missed: list[Missed]) -> Missed:
    """Return what all of them say: one event, in the same words."""
    assert len({each[:3] for each in missed}) == 1
    return missed[0]


def survivors(outcomes: RankOutcomes, *lost: int) -> list[Any]:
    assert {rank for rank, error in outcomes.errors().items() if isinstance(error, RankDied)} == set(lost)
    return [outcome.value for outcome in outcomes if outcome.rank not in lost]


# -- when, by a clock that the tests move ------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_sec", [0.5, 2.0, 300.0])
@pytest.mark.parametrize("came", [True, False], ids=["later", "first use"])
def test_rank_that_never_calls_is_missing_at_the_timeout_and_not_before(
    clock: Clock, came: bool, timeout_sec: float
) -> None:
    group = LonelyGroup(clock, came=came)
    reducer = StatsReducer(group=group, timeout_sec=timeout_sec)
    missed = attempt(reducer, {"loss": 1.0})
    assert missed.missing == missed.ranks == (1,)
    assert "  rank 1: did not take part\n" in missed.text
    assert timeout_sec * 0.9 <= clock.now <= timeout_sec + 0.5
    ended = clock.now
    assert attempt(reducer, {"loss": 1.0})[:3] == missed[:3]
    assert attempt(any_rank, True, group=group)[:3] == missed[:3]
    assert clock.now == ended  # the group is closed: nothing waits


@pytest.mark.parametrize("timeout_sec", [3.0, 300.0])
@pytest.mark.parametrize("where", ["first use", "new keys"])
def test_call_has_one_deadline_whatever_it_takes_inside(clock: Clock, where: str, timeout_sec: float) -> None:
    """The others come late to the first use; or the reduction says after a while that ranks hold other keys."""
    late_sec = 0.8 * timeout_sec if where == "first use" else 0.6 * timeout_sec
    group = LonelyGroup(clock, came_sec=late_sec) if where == "first use" else LonelyGroup(clock, reduced_sec=late_sec)
    missed = attempt(StatsReducer(group=group, timeout_sec=timeout_sec), {"loss": 1.0})
    assert missed.missing == (1,)
    assert timeout_sec * 0.9 <= clock.now <= timeout_sec + 1.0


@LINUX
def test_rank_that_is_killed_is_missing_within_a_second_on_its_host(clock: Clock, child: Program) -> None:
    def kill() -> None:
        os.kill(child.pid, signal.SIGKILL)
        wait_until_ended(child.pid)

    clock.at(5.0, kill)
    missed = attempt(StatsReducer(group=LonelyGroup(clock, process=id_of(child.pid)), timeout_sec=300.0), {"loss": 1.0})
    assert missed.missing == (1,)
    assert "  rank 1: the process is gone\n" in missed.text
    assert 5.0 <= clock.now <= 5.0 + 1.5


def test_missing_rank_of_started_reduction_is_raised_by_result(clock: Clock) -> None:
    with StatsReducer(group=LonelyGroup(clock), timeout_sec=3.0) as reducer:
        pending = [reducer.start({"loss": float(step)}) for step in range(3)]
        missed = agreed([attempt(each.result) for each in pending])
        assert all(each.done() for each in pending)
    assert missed.missing == (1,)
    assert 2.7 <= clock.now <= 3.5


def test_missing_rank_of_subgroup_is_named_by_its_global_rank(clock: Clock) -> None:
    missed = attempt(StatsReducer(group=LonelyGroup(clock, (1, 2)), timeout_sec=3.0), {"loss": 1.0})
    assert missed.missing == missed.ranks == (2,)
    assert "  rank 2 (group rank 1): did not take part\n" in missed.text
    assert "\nrank 1 (group rank 0) waited and saw: " in missed.text


def test_long_list_of_missing_ranks_is_cut_in_the_text_only(clock: Clock) -> None:
    missed = attempt(StatsReducer(group=LonelyGroup(clock, tuple(range(32))), timeout_sec=3.0), {"loss": 1.0})
    assert missed.missing == tuple(range(1, 32))
    assert "  ranks 1, 2, 3, 4, 5, 6, 7, 8 and 23 more: did not take part\n" in missed.text


# -- a rank that lives and does not call -------------------------------------------------------------------------------


def call_last_after_all_gave_up(group_ranks: list[int], first_use: bool) -> Missed | None:
    """Reduce on a group of these ranks, whose last one calls when all others have given up."""
    group = dist.new_group(group_ranks)
    missed, last = None, group_ranks[-1]
    if dist.get_rank() in group_ranks and not first_use:
        StatsReducer(group=group, timeout_sec=LONG_SEC)({"loss": 1.0})
    dist.barrier()
    reducer = StatsReducer(group=group, timeout_sec=LONG_SEC if dist.get_rank() == last else SHORT_SEC)
    if dist.get_rank() in group_ranks[:-1]:
        missed = attempt(reducer, {"loss": 1.0})
    dist.barrier()
    if dist.get_rank() == last:
        missed = attempt(reducer, {"loss": 1.0})
    return missed


@pytest.mark.parametrize(
    ("group_ranks", "first_use"),
    [
        ([1, 2], False),
        pytest.param([0, 1, 2], True, marks=pytest.mark.slow),
    ],
    ids=["later", "first use"],
)
def test_only_the_rank_that_never_calls_is_missing_on_all(
    three_ranks: RankPool, group_ranks: list[int], first_use: bool
) -> None:
    outcomes = three_ranks.run(call_last_after_all_gave_up, group_ranks, first_use, timeout_sec=LIMIT_SEC).values()
    *waiting, late = outcomes[group_ranks[0] :]
    missed = agreed([*waiting, late])
    assert missed.missing == missed.ranks == (2,)
    assert ": did not take part\n" in missed.text
    assert max(each.after_sec for each in waiting) <= LATEST_SEC
    assert late.after_sec < AT_ONCE_SEC  # the verdict is there


# -- a rank that leaves in the middle of a call ------------------------------------------------------------------------


def interrupt_rank_0() -> tuple[list[float], Missed]:
    """Interrupt rank 0 while it waits for rank 1; it goes on calling as if nothing had happened."""
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=LONG_SEC)
    reducer({"loss": 1.0})
    if dist.get_rank() == 0:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            reducer({"loss": 10.0})
        signal.signal(signal.SIGINT, previous)
        dist.barrier()
        return [], attempt(reducer, {"loss": 1000.0})
    dist.barrier()
    values: list[float] = []
    while True:
        try:
            values.append(reducer({"loss": 20.0}).values["loss"])
        except RankMissing as error:
            return values, Missed(str(error), error.missing_ranks, error.ranks, 0.0)


def test_rank_that_is_interrupted_in_a_call_is_missing_and_says_why(two_ranks: RankPool) -> None:
    """Numbers that the interrupted rank handed in later are part of no result."""
    (_, missed_by_rank_0), (values, missed_by_rank_1) = two_ranks.run(interrupt_rank_0, timeout_sec=LIMIT_SEC).values()
    assert set(values) <= {15.0}
    missed = agreed([missed_by_rank_0, missed_by_rank_1])
    assert missed.missing == (0,)
    assert "  rank 0: left in the middle of it (KeyboardInterrupt)\n" in missed.text


# -- many ranks --------------------------------------------------------------------------------------------------------


def stay_away(group: ThreadGroup, together: threading.Barrier) -> Missed:
    StatsReducer(group=group, timeout_sec=LONG_SEC)({"loss": 1.0})
    together.wait(LIMIT_SEC)  # the last of 64 threads may come much later from that than the first
    reducer = group.reducer(timeout_sec=4 * SHORT_SEC)  # under load their answers came within 0.2 s
    if group.rank == 40:
        together.wait(LIMIT_SEC)
        return attempt(reducer, {"loss": 1.0})
    missed = attempt(reducer, {"loss": 1.0})
    together.wait(LIMIT_SEC)
    return missed


@pytest.mark.slow
def test_one_of_64_ranks_is_missing_on_all() -> None:
    missed = agreed(run_threads(stay_away, 64, threading.Barrier(64), timeout_sec=LIMIT_SEC).values())
    assert missed.missing == (40,)


# -- a rank that dies --------------------------------------------------------------------------------------------------


def lose_the_last_rank_while_reducing() -> tuple[float, list[Missed]]:
    """Return the seconds from the last success to the error, and what was raised then and afterwards."""
    world_size, group, idle = dist.get_world_size(), dist.new_group(), dist.new_group()
    reducer = StatsReducer(group=group, name="busy", timeout_sec=LONG_SEC)
    waiting = StatsReducer(group=idle, name="idle", timeout_sec=LONG_SEC)
    reducer({"loss": 1.0})
    waiting({"loss": 1.0})
    chance = random.Random(dist.get_rank())
    if dist.get_rank() == world_size - 1:
        threading.Timer(0.3, die).start()
    succeeded = time.monotonic()
    while True:
        try:
            reducer({f"loss{chance.randrange(3)}": 1.0})
            succeeded = time.monotonic()
            time.sleep(chance.random() / 500)
        except RankMissing as error:
            first = Missed(str(error), error.missing_ranks, error.ranks, time.monotonic() - succeeded)
            break
    again = [attempt(reducer, {"loss": 1.0}), attempt(StatsReducer(group=group, name="other"), {"loss": 1.0})]
    again += [attempt(any_rank, True, group=group), attempt(lambda: reducer.start({"loss": 1.0}).result())]
    reducer.close()
    return first.after_sec, [first, *again, attempt(waiting, {"loss": 1.0})]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rank_that_is_killed_while_it_reduces_is_missing_at_once_on_all(world_size: int) -> None:
    outcomes = run_ranks(lose_the_last_rank_while_reducing, world_size, timeout_sec=LIMIT_SEC)
    results = survivors(outcomes, world_size - 1)
    assert max(after_sec for after_sec, _ in results) < 2 * 1.0 + 5.0  # promised: within a second
    busy = agreed([each for _, missed in results for each in missed[:-1]])
    idle = agreed([missed[-1] for _, missed in results])
    assert busy.missing == busy.ranks == idle.missing == (world_size - 1,)
    assert f"  rank {world_size - 1}: the process is gone\n" in busy.text
    for each in (busy, idle):
        assert re.match(
            rf"a reduction on group '\d+' of {world_size} ranks was not completed after \d+\.\d s:\n", each.text
        )
    assert max(each.after_sec for _, missed in results for each in missed[1:-1]) < AT_ONCE_SEC  # closed


def dying(*args: Any, **kwargs: Any) -> Any:
    die()


def lose_one_after_another(in_grid: bool) -> list[Missed]:
    """Let ranks 3, 2 and 1 die in turn, each at another point of a call; the others go on with a new group."""
    rank, missed = dist.get_rank(), []
    if in_grid:  # four ranks in 2 x 2, three of which one is a guest, then two
        grid.GRID_FROM_RANKS, grid._LONGEST_SIDE = 2, 2
    for victim, size in ((3, 4), (2, 3), (1, 2)):
        group = dist.new_group(list(range(size)))
        reducer = StatsReducer(group=group, timeout_sec=SHORT_SEC if victim == 1 else LONG_SEC)
        if victim == 1:  # in the middle of the first call: they have met, and are about to connect
            if rank == 1:
                vars(calls)["gloo_comm"] = dying
        else:
            assert reducer({"loss": 1.0}).values == {"loss": 1.0}
        if rank == 3:  # before its next call
            die()
        if rank == victim == 2:  # in the middle of a renegotiation, in which all ranks gather what each holds
            comm.GlooComm.all_gather = dying  # type: ignore[method-assign]
        missed.append(attempt(reducer, {"loss": 1.0, "new": float(rank)}))
    return missed


@pytest.mark.slow
@pytest.mark.parametrize("in_grid", [False, True])
def test_rank_that_dies_at_any_point_of_a_call_is_missing(in_grid: bool) -> None:
    outcomes = run_ranks(lose_one_after_another, 4, in_grid, timeout_sec=LIMIT_SEC)
    assert {rank: type(error) for rank, error in outcomes.errors().items()} == dict.fromkeys((1, 2, 3), RankDied)
    for missed, victim in zip(outcomes[0].value, (3, 2, 1), strict=True):
        assert missed.missing == (victim,)
        assert missed.after_sec < (LATEST_SEC if victim == 1 else LONG_SEC / 2)


# -- the end of a process ----------------------------------------------------------------------------------------------

ENDING_RANK = """
import os, signal, sys, time
import torch.distributed as dist
from ddpstats import StatsReducer
from ddpstats.errors import RankMissing

rank, world_size, path, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world_size)
reducer = StatsReducer(timeout_sec=3.0 if how == "sleeps" else 600.0)
reducer({"loss": 1.0})
if rank == world_size - 1:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
try:
    reducer({"loss": 1.0})
except RankMissing as error:
    print(error.missing_ranks, flush=True)
"""


@pytest.mark.parametrize("how", tiers([], ["sleeps"], ["dies"]))
def test_process_ends_although_operations_are_pending(how: str, tmp_path: pathlib.Path) -> None:
    """The waits that were given up have limits of minutes, or peers that never answer; the exit waits for neither."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as stack:
        # fresh: how the interpreter ends is what is tested
        ranks = [
            stack.enter_context(
                Program(["-c", ENDING_RANK, str(rank), "3", str(tmp_path / "store"), how], environ, fresh=True)
            )
            for rank in range(3)
        ]
        for rank in ranks[:2]:
            done = rank.finish(LIMIT_SEC)
            assert (done.returncode, done.stdout) == (0, "(2,)\n"), done.stderr
