"""A rank knows which processes the others are, which of them are dead, and what that means without the store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._ranks.roster import PROCESS_ID_BYTES, ProcessId, Roster
from ddpstats._ranks.store import BoundedStore, StoreGone, StoreSilent, bounded
from tests.programs import Program
from tests.ranks.clock import Clock
from tests.ranks.processes import LINUX, id_of, state_of, wait_until_ended

ELSEWHERE = ProcessId(b"another machine!", 1, 1)


@LINUX
def test_this_process_is_alive_and_its_id_travels() -> None:
    mine = ProcessId.mine()
    assert (mine.pid, mine.is_dead()) == (os.getpid(), False)
    assert mine.started > 0
    assert len(mine.pack()) == PROCESS_ID_BYTES
    assert ProcessId.unpack(mine.pack()) == mine


@LINUX
def test_killed_process_is_dead_as_a_zombie_and_when_it_is_gone(child: Program) -> None:
    process = id_of(child.pid)
    assert not process.is_dead()
    os.kill(child.pid, signal.SIGKILL)
    wait_until_ended(child.pid)
    assert state_of(child.pid) == "Z"
    assert process.is_dead()
    child.wait(10)
    assert process.is_dead()
    assert not dataclasses.replace(process, machine=bytes(16)).is_dead()  # this host cannot know
    assert not dataclasses.replace(process, started=0).is_dead()


@LINUX
def test_stopped_process_is_not_dead(child: Program) -> None:
    process = id_of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while state_of(child.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(child.pid) == "T"
    assert not process.is_dead()


@LINUX
def test_process_whose_number_another_one_has_is_dead(child: Program) -> None:
    assert dataclasses.replace(id_of(child.pid), started=id_of(child.pid).started - 1).is_dead()


# -- a roster ---------------------------------------------------------------------------------------------------------


def roster_of(store: BoundedStore, rank: int) -> Roster:
    return Roster(store, rank, range(4))


def test_ranks_that_joined_are_known_and_garbage_is_not() -> None:
    store = bounded(HashStore())
    for rank in (1, 2):
        roster_of(store, rank).join()
    store.set("here/2", "abc")
    mine = roster_of(store, 0)
    mine.learn()
    assert mine.peers == {1: ProcessId.mine()}
    assert not mine.are_all_here()
    assert mine.absent() == [0, 3]


def test_ranks_that_join_later_are_learnt_and_then_the_store_is_not_asked() -> None:
    store = bounded(HashStore())
    mine = roster_of(store, 0)
    mine.join()
    for rank in range(1, 4):
        mine.learn()
        assert set(mine.peers) == set(range(1, rank))
        roster_of(store, rank).join()
    assert mine.are_all_here()
    mine.learn()
    assert set(mine.peers) == {1, 2, 3}
    store.use = None  # type: ignore[assignment,method-assign]
    mine.learn()


def test_store_that_is_silent_for_a_moment_loses_no_rank_of_this_host() -> None:
    store = bounded(HashStore())
    rosters = [roster_of(store, rank) for rank in range(4)]
    for roster in rosters:
        roster.join()
    answers = [[b"0", b"1", b"2", b"3"], StoreSilent("late")]
    with mock.patch.object(store, "multi_get", side_effect=answers), pytest.raises(StoreSilent):
        rosters[0].learn()
    assert not rosters[0].elsewhere()
    rosters[0].learn()
    assert set(rosters[0].peers) == {1, 2, 3}


def test_rank_on_another_host_has_come_although_its_number_is_of_this_host() -> None:
    """Ranks that are dealt out to hosts in turn: to the launcher's variables rank 1 looks like a neighbour."""
    mine = roster_of(bounded(HashStore()), 0)
    with mock.patch("ddpstats._ranks.launcher.ended", side_effect=lambda ranks, *_: set(ranks)):
        assert mine.never_came() == {0, 1, 2, 3}
        mine.met({0: ProcessId.mine(), 1: ELSEWHERE, 2: ProcessId.mine(), 3: ELSEWHERE})
        assert mine.never_came() == set()


def test_rank_that_died_while_it_joined_hides_no_other() -> None:
    store = bounded(HashStore())
    store.add(f"host/{ProcessId.mine().machine.hex()}", 1)  # and no more
    roster_of(store, 1).join()
    mine = roster_of(store, 0)
    mine.learn()
    assert set(mine.peers) == {1}


def test_ranks_that_have_met_know_who_is_elsewhere() -> None:
    mine = roster_of(bounded(HashStore()), 0)
    mine.met({0: ProcessId.mine(), 1: ProcessId.mine(), 2: ELSEWHERE, 3: ELSEWHERE})
    assert set(mine.peers) == {1}
    assert mine.elsewhere() == {2, 3}


HERE = ProcessId.mine()
GONE = dataclasses.replace(HERE, started=HERE.started - 1)
CLOSED, RESET, SILENT = StoreGone("gone"), OSError("reset"), StoreSilent("no answer in time")

SERVER_GONE = (0,), "  rank 0: is gone, and the store with it"
SERVER_SILENT = (0,), "  rank 0: serves the store, which does not answer"
RANK_2_GONE = (2,), "  rank 2: the process is gone"
NOT_KNOWN = (), "  who is missing cannot be told"

# This rank, the rank that serves the store, whether a process listens at its address, the peers that this rank knows,
# how the store failed, whom it waits for; and what it concludes.
WITHOUT_STORE: list[tuple[int, int | None, bool | None, dict[int, ProcessId], OSError, tuple[int, ...], Any]] = [
    (1, 0, False, {0: GONE, 2: HERE, 3: ELSEWHERE}, CLOSED, (0, 1, 2), SERVER_GONE),
    (1, 0, False, {0: GONE, 2: GONE, 3: ELSEWHERE}, CLOSED, (0, 1, 2), SERVER_GONE),
    (1, 0, False, {0: ELSEWHERE, 2: GONE, 3: ELSEWHERE}, CLOSED, (0, 1, 2), SERVER_GONE),
    (1, 0, False, {0: ELSEWHERE, 2: HERE}, RESET, (0, 1, 2), SERVER_GONE),
    # rank 0 lives, and has left its process group
    (1, 0, False, {0: HERE, 2: GONE, 3: ELSEWHERE}, CLOSED, (0, 1, 2), RANK_2_GONE),
    (0, 0, False, {1: HERE, 2: GONE, 3: ELSEWHERE}, CLOSED, (0, 2), RANK_2_GONE),
    (1, 0, False, {0: HERE, 2: HERE, 3: ELSEWHERE}, CLOSED, (0, 1, 2), SERVER_GONE),
    (0, 0, False, {1: HERE, 2: HERE, 3: ELSEWHERE}, CLOSED, (0, 2), SERVER_GONE),
    # it is in no group of this rank's
    (1, 0, False, {2: GONE}, CLOSED, (1, 2), RANK_2_GONE),
    (1, 0, False, {2: HERE}, CLOSED, (1, 2), SERVER_GONE),
    # stopped, on this host or another one: a process that listens can be reached
    (1, 0, True, {0: HERE, 3: ELSEWHERE}, SILENT, (0, 1, 2, 3), SERVER_SILENT),
    (1, 0, True, {0: ELSEWHERE, 3: ELSEWHERE}, SILENT, (0, 1, 3), SERVER_SILENT),
    (1, None, True, {0: HERE, 3: ELSEWHERE}, SILENT, (1, 2, 3), NOT_KNOWN),
    (1, 0, None, {0: ELSEWHERE}, SILENT, (0, 1), ((0,), "cut off: the store does not answer; rank 0 of other")),
    (1, 0, None, {0: HERE, 3: ELSEWHERE}, SILENT, (1, 2, 3), ((3,), "cut off: the store does not answer; rank 3")),
    (1, 0, None, {0: HERE, 3: ELSEWHERE}, SILENT, (1, 2), SERVER_SILENT),
    (0, 0, None, {1: HERE}, SILENT, (0, 1), NOT_KNOWN),
    (1, None, None, {0: HERE, 3: ELSEWHERE}, SILENT, (1, 2), NOT_KNOWN),
]


@LINUX
@pytest.mark.parametrize(("rank", "host", "is_served", "peers", "error", "ranks", "conclusion"), WITHOUT_STORE)
def test_conclusion_without_the_store(
    clock: Clock,
    rank: int,
    host: int | None,
    is_served: bool | None,
    peers: dict[int, ProcessId],
    error: OSError,
    ranks: tuple[int, ...],
    conclusion: tuple[tuple[int, ...], str],
) -> None:
    with listening(is_served) as address:
        store = BoundedStore(HashStore, address=address, host_rank=host)
        roster = Roster(store, rank, range(4), peers)
        lost = roster.known_alone(error, ranks)
    missing, line = conclusion
    assert lost.missing == missing
    assert line in "\n".join(roster.told_alone(lost))
    assert clock.now < 5.0


@contextlib.contextmanager
def listening(is_served: bool | None) -> Iterator[tuple[str, int] | None]:
    """Yield an address at which a process listens, or none does, or None."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
        if is_served is False:
            server.close()
        yield None if is_served is None else address
