"""Ranks that die, never call, come late or leave: every living rank raises the same `RankMissing`, in time."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from ddpstats import StatsReducer, any_rank
from ddpstats._agreement import channel
from ddpstats._transport import comm, grid_comm
from ddpstats.errors import RankMissing
from ddpstats.testing import RankDied, RankOutcomes, RankPool, die, run_ranks, run_threads, sleep_past
from ddpstats.testing._threads import ThreadGroup
from tests.programs import Program

LIMIT_SEC = 100.0
LONG_SEC = 40.0  # a timeout that a test never lives to see
SHORT_SEC = 2.0  # one that passes while the test waits
SLACK_SEC = 5.0  # for a machine that has other things to do


class Missed(NamedTuple):
    """What a reduction raised, and after how long."""

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
    """The one event that all of them tell of."""
    assert len({one[:3] for one in missed}) == 1
    return missed[0]


def survivors(outcomes: RankOutcomes, *lost: int) -> list[Any]:
    assert {rank for rank, error in outcomes.errors().items() if isinstance(error, RankDied)} == set(lost)
    return [one.value for one in outcomes if one.rank not in lost]


# -- a rank that lives and does not call -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout_sec=LIMIT_SEC) as pool:
        yield pool


@pytest.fixture(params=[2, 3, 4])
def pool(request: pytest.FixtureRequest) -> RankPool:
    found: RankPool = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[request.param])
    return found


def arrive_one_by_one(first_use: bool) -> Missed:
    """Each rank calls somewhat later than the one before; the last not at all until all others have given up."""
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=SHORT_SEC)
    if not first_use:
        reducer({"loss": 1.0})
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        sleep_past(SHORT_SEC, margin_sec=1.5)
    else:
        time.sleep(0.3 * rank)
    missed = attempt(reducer, {"loss": 1.0})
    assert attempt(reducer, {"loss": 1.0})[:3] == missed[:3]
    return missed


@pytest.mark.parametrize("first_use", [False, True], ids=["later", "first use"])
def test_only_the_rank_that_never_calls_is_blamed(pool: RankPool, first_use: bool) -> None:
    *others, late = pool.run(arrive_one_by_one, first_use, timeout_sec=LIMIT_SEC).values()
    last = pool.world_size - 1
    told = agreed([*others, late])
    assert told.missing == told.ranks == (last,)
    assert f"  rank {last}: did not take part\n" in told.text
    assert max(one.after_sec for one in others) <= SHORT_SEC + SLACK_SEC
    assert late.after_sec < SHORT_SEC  # it does not wait for anybody: the verdict is there


def start_one_by_one() -> list[Missed]:
    with StatsReducer(group=dist.new_group(), timeout_sec=SHORT_SEC) as reducer:
        reducer.start({"loss": 1.0}).result()
        if dist.get_rank() == 1:
            sleep_past(SHORT_SEC, margin_sec=1.5)
        pending = [reducer.start({"loss": float(step)}) for step in range(3)]
        missed = [attempt(one.result) for one in pending]
        assert all(one.done() for one in pending)
        return missed


def test_it_is_raised_where_the_result_is_asked_for(three_ranks: RankPool) -> None:
    outcomes = three_ranks.run(start_one_by_one, timeout_sec=LIMIT_SEC).values()
    assert agreed([one for missed in outcomes for one in missed]).missing == (1,)


def within_a_subgroup() -> Missed | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    reducer = StatsReducer(group=group, timeout_sec=SHORT_SEC)
    reducer({"loss": 1.0})
    if dist.get_rank() == 2:
        sleep_past(SHORT_SEC, margin_sec=1.5)
    return attempt(reducer, {"loss": 1.0})


def test_ranks_of_a_subgroup_are_named_by_their_global_rank(three_ranks: RankPool) -> None:
    outsider, *members = three_ranks.run(within_a_subgroup, timeout_sec=LIMIT_SEC).values()
    assert outsider is None
    told = agreed(members)
    assert told.missing == told.ranks == (2,)
    assert "  rank 2 (group rank 1): did not take part\n" in told.text
    assert "\nrank 1 (group rank 0) waited and saw: " in told.text


def one_call_more() -> Missed | None:
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=SHORT_SEC)
    for _ in range(3):
        reducer({"loss": 1.0})
    if dist.get_rank() == 0:
        return attempt(reducer, {"loss": 1.0})
    sleep_past(SHORT_SEC, margin_sec=1.0)
    return None


def test_a_rank_with_one_call_more_waits_alone_in_the_end(two_ranks: RankPool) -> None:
    alone, other = two_ranks.run(one_call_more, timeout_sec=LIMIT_SEC).values()
    assert other is None
    assert alone.missing == (1,)
    assert alone.after_sec <= SHORT_SEC + SLACK_SEC


def other_groups_go_on() -> tuple[Missed, float, bool]:
    broken, healthy = dist.new_group(), dist.new_group()
    reducer = StatsReducer(group=broken, timeout_sec=SHORT_SEC)
    reducer({"loss": 1.0})
    if dist.get_rank() == 1:
        sleep_past(SHORT_SEC, margin_sec=1.0)
    missed = attempt(reducer, {"loss": 1.0})
    again = StatsReducer(group=dist.new_group(), timeout_sec=LONG_SEC)
    return missed, again({"loss": float(dist.get_rank())}).values["loss"], any_rank(False, group=healthy)


def test_a_closed_group_closes_no_other(two_ranks: RankPool) -> None:
    told = two_ranks.run(other_groups_go_on, timeout_sec=LIMIT_SEC).values()
    assert agreed([missed for missed, _, _ in told]).missing == (1,)
    assert [rest for _, *rest in told] == [[0.5, False]] * 2


# -- a rank that leaves in the middle of a call ------------------------------------------------------------------------


def interrupt_rank_0() -> tuple[list[float], Missed]:
    """Rank 0 is interrupted while it waits for rank 1, and goes on calling as if nothing had happened."""
    reducer = StatsReducer(group=dist.new_group(), timeout_sec=LONG_SEC)
    reducer({"loss": 1.0})
    if dist.get_rank() == 0:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            reducer({"loss": 10.0})
        signal.signal(signal.SIGINT, previous)
        return [], attempt(reducer, {"loss": 1000.0})
    time.sleep(3.0)
    values: list[float] = []
    while True:
        try:
            values.append(reducer({"loss": 20.0}).values["loss"])
        except RankMissing as error:
            return values, Missed(str(error), error.missing_ranks, error.ranks, 0.0)


def test_an_interrupted_rank_is_out_of_step_and_says_so(two_ranks: RankPool) -> None:
    """No number may be made of what the interrupted rank handed in later."""
    (_, left), (values, other) = two_ranks.run(interrupt_rank_0, timeout_sec=LIMIT_SEC).values()
    assert set(values) <= {15.0}
    told = agreed([left, other])
    assert told.missing == (0,)
    assert "  rank 0: left in the middle of it (KeyboardInterrupt)\n" in told.text


# -- many ranks --------------------------------------------------------------------------------------------------------


def one_thread_stays_away(group: ThreadGroup) -> Missed | None:
    limit_sec = 4 * SHORT_SEC  # 64 threads share two cores
    reducer = group.reducer(timeout_sec=limit_sec)
    reducer({"loss": 1.0})
    if group.rank == 40:
        sleep_past(limit_sec, margin_sec=1.5)
    return attempt(reducer, {"loss": 1.0})


def test_one_of_64_ranks_is_named_by_all() -> None:
    told = agreed(run_threads(one_thread_stays_away, 64, timeout_sec=LIMIT_SEC).values())
    assert told.missing == (40,)


def many_threads_stay_away(group: ThreadGroup) -> Missed:
    reducer = group.reducer(timeout_sec=SHORT_SEC)
    if group.rank >= 12:
        sleep_past(SHORT_SEC, margin_sec=1.5)
    return attempt(reducer, {"loss": 1.0})


def test_a_long_list_of_missing_ranks_is_cut_in_the_text_only() -> None:
    told = agreed(run_threads(many_threads_stay_away, 32, timeout_sec=LIMIT_SEC).values())
    assert told.missing == tuple(range(12, 32))
    assert "  ranks 12, 13, 14, 15, 16, 17, 18, 19 and 12 more: did not take part\n" in told.text


# -- a rank that dies --------------------------------------------------------------------------------------------------


def lose_the_last_rank_while_reducing() -> tuple[float, list[Missed]]:
    """Seconds from the last success to the error, and what was raised then and afterwards."""
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


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_killed_in_the_middle_is_named_at_once_by_all_survivors(world_size: int, four_ranks: RankPool) -> None:
    run = four_ranks.run if world_size == 4 else functools.partial(run_ranks, world_size=world_size)
    outcomes = run(lose_the_last_rank_while_reducing, timeout_sec=LIMIT_SEC)
    told = survivors(outcomes, world_size - 1)
    assert max(after_sec for after_sec, _ in told) < LONG_SEC / 2
    busy = agreed([one for _, missed in told for one in missed[:-1]])
    idle = agreed([missed[-1] for _, missed in told])
    assert busy.missing == busy.ranks == idle.missing == (world_size - 1,)
    assert f"  rank {world_size - 1}: the process is gone\n" in busy.text
    for one in (busy, idle):
        assert re.match(
            rf"a reduction on group '\d+' of {world_size} ranks was not completed after \d+\.\d s:\n", one.text
        )
    assert max(one.after_sec for _, missed in told for one in missed[1:-1]) < 1.0  # closed: nothing is tried any more


def dying(*args: Any, **kwargs: Any) -> Any:
    die()


def lose_one_after_another(in_grid: bool) -> list[Missed]:
    """Ranks 3, 2 and 1 die in turn, each at another point of a call; who is left goes on with a new group."""
    rank, missed = dist.get_rank(), []
    if in_grid:  # four ranks in 2 x 2, three of which one is a guest, then two
        grid_comm.GRID_FROM_RANKS, grid_comm._LONGEST_SIDE = 2, 2
    for victim, size in ((3, 4), (2, 3), (1, 2)):
        group = dist.new_group(list(range(size)))
        reducer = StatsReducer(group=group, timeout_sec=SHORT_SEC if victim == 1 else LONG_SEC)
        if victim == 1:  # in the middle of the first call: they have met, and are about to connect
            if rank == 1:
                vars(channel)["gloo_comm"] = dying
        else:
            assert reducer({"loss": 1.0}).values == {"loss": 1.0}
        if rank == 3:  # before its next call
            die()
        if rank == victim == 2:  # in the middle of a renegotiation, in which all ranks gather what each holds
            comm.GlooComm.all_gather = dying  # type: ignore[method-assign]
        missed.append(attempt(reducer, {"loss": 1.0, "new": float(rank)}))
    return missed


@pytest.mark.parametrize("in_grid", [False, True])
def test_a_rank_may_die_at_any_point_of_a_call(in_grid: bool) -> None:
    outcomes = run_ranks(lose_one_after_another, 4, in_grid, timeout_sec=LIMIT_SEC)
    assert {rank: type(error) for rank, error in outcomes.errors().items()} == dict.fromkeys((1, 2, 3), RankDied)
    for one, victim in zip(outcomes[0].value, (3, 2, 1), strict=True):
        assert one.missing == (victim,)
        assert one.after_sec < (2 * SHORT_SEC + SLACK_SEC if victim == 1 else LONG_SEC / 2)


def lose_one_before_its_values() -> Missed:
    """The sum of all is there, on all ranks; the exchange of single ranks' values begins."""
    reducer = StatsReducer(timeout_sec=LONG_SEC, per_rank=True)
    assert reducer({"loss": 1.0}).flat_by_rank()["loss"].values == (1.0, 1.0, 1.0)
    if dist.get_rank() == 1:
        comm.GlooComm.all_gather = dying  # type: ignore[method-assign]
    return attempt(reducer, {"loss": 1.0})


def test_a_rank_may_die_between_the_sum_and_single_ranks_values() -> None:
    outcomes = run_ranks(lose_one_before_its_values, 3, timeout_sec=LIMIT_SEC)
    missed = agreed(survivors(outcomes, 1))
    assert missed.missing == (1,)
    assert max(one.after_sec for one in survivors(outcomes, 1)) < LONG_SEC / 2


def exit_early() -> Missed:
    reducer = StatsReducer(timeout_sec=LONG_SEC)
    for step in range(5):
        reducer({"loss": 1.0})
        if dist.get_rank() == 1 and step == 3:
            os._exit(0)
        if step == 4:
            break
        if step == 3:
            return attempt(reducer, {"loss": 1.0})
    raise AssertionError("unreachable")


def test_a_rank_that_ends_normally_is_missing_all_the_same() -> None:
    outcomes = run_ranks(exit_early, 2, timeout_sec=LIMIT_SEC)
    (told,) = survivors(outcomes, 1)
    assert outcomes[1].exit_code == 0
    assert told.missing == (1,)
    assert told.after_sec < LONG_SEC / 2


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


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_process_ends_although_operations_are_pending(how: str, tmp_path: pathlib.Path) -> None:
    """The waits that were given up have limits of minutes, or peers that never answer; the exit waits for neither."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Program(
                    ["-c", ENDING_RANK, str(rank), "3", str(tmp_path / "store"), how],
                    {**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                    fresh=True,  # how the interpreter ends is what is tested
                )
            )
            for rank in range(3)
        ]
        for rank in ranks[:2]:
            done = rank.finish(LIMIT_SEC)
            assert (done.returncode, done.stdout) == (0, "(2,)\n"), done.stderr
