"""Which processes the ranks are, and what a rank knows of them without the store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from unittest import mock

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._transport.roster import PROCESS_ID_BYTES, ProcessId, Roster
from ddpstats._transport.store import BoundedStore, StoreGone, StoreSilent, bounded
from tests.transport.processes import LINUX, id_of

ELSEWHERE = ProcessId(b"another machine!", 1, 1)


def wait_until_dead(process: ProcessId) -> bool:
    deadline = time.monotonic() + 10
    while not process.is_dead() and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.is_dead()


@LINUX
def test_this_process_is_alive_and_its_id_travels() -> None:
    mine = ProcessId.mine()
    assert (mine.pid, mine.is_dead()) == (os.getpid(), False)
    assert mine.started > 0
    assert len(mine.pack()) == PROCESS_ID_BYTES
    assert ProcessId.unpack(mine.pack()) == mine


@LINUX
def test_a_killed_process_is_dead_as_a_zombie_and_when_it_is_gone(child: subprocess.Popen[bytes]) -> None:
    process = id_of(child.pid)
    assert not process.is_dead()
    child.send_signal(signal.SIGKILL)
    assert wait_until_dead(process)  # nobody has waited for it: a zombie
    with open(f"/proc/{child.pid}/stat", "rb") as file:
        assert file.read().rpartition(b")")[2].split()[0] == b"Z"
    child.wait(10)
    assert process.is_dead()


@LINUX
def test_a_stopped_process_is_not_dead(child: subprocess.Popen[bytes]) -> None:
    process = id_of(child.pid)
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert not process.is_dead()


@LINUX
def test_a_pid_that_was_given_to_another_process_does_not_hide_a_death(child: subprocess.Popen[bytes]) -> None:
    assert dataclasses.replace(id_of(child.pid), started=id_of(child.pid).started - 1).is_dead()


@LINUX
def test_what_this_host_cannot_know_is_not_called_dead(child: subprocess.Popen[bytes]) -> None:
    process = id_of(child.pid)
    child.kill()
    child.wait(10)
    assert process.is_dead()
    assert not dataclasses.replace(process, machine=bytes(16)).is_dead()
    assert not dataclasses.replace(process, started=0).is_dead()


# -- a roster ---------------------------------------------------------------------------------------------------------


def roster_of(store: BoundedStore, rank: int) -> Roster:
    return Roster(store, rank, range(4))


def test_who_has_joined_is_known_and_bytes_of_others_are_not() -> None:
    store = bounded(HashStore())
    for rank in (1, 2):
        roster_of(store, rank).join()
    store.set("here/2", "abc")
    mine = roster_of(store, 0)
    mine.learn()
    assert mine.peers == {1: ProcessId.mine()}
    assert not mine.are_all_here()
    assert mine.absent() == [0, 3]


def test_who_joins_later_is_learnt_later_and_then_nobody_is_asked_for_any_more() -> None:
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


def test_a_store_that_is_silent_for_a_moment_loses_no_rank_of_this_host() -> None:
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


def test_a_rank_that_is_elsewhere_has_come_although_its_number_is_of_this_host() -> None:
    """Ranks that are dealt out to hosts in turn: to the launcher's variables rank 1 looks like a neighbour."""
    mine = roster_of(bounded(HashStore()), 0)
    with mock.patch("ddpstats._transport.launcher.ended", side_effect=lambda ranks, *_: set(ranks)):
        assert mine.never_came() == {0, 1, 2, 3}
        mine.met({0: ProcessId.mine(), 1: ELSEWHERE, 2: ProcessId.mine(), 3: ELSEWHERE})
        assert mine.never_came() == set()


def test_a_rank_that_died_while_it_joined_hides_no_other() -> None:
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
GONE_LINE, SILENT_LINE = "  rank 0: is gone, and the store with it", "  rank 0: serves the store, which does not answer"


STOPPED = StoreSilent("no answer in time")


@LINUX
@pytest.mark.parametrize(
    ("rank", "host", "served", "peers", "error", "ranks", "missing", "line"),
    [
        (1, 0, False, {0: GONE, 2: HERE, 3: ELSEWHERE}, StoreGone("gone"), (0, 1, 2), (0,), GONE_LINE),
        (1, 0, False, {0: GONE, 2: GONE, 3: ELSEWHERE}, StoreGone("gone"), (0, 1, 2), (0,), GONE_LINE),
        (1, 0, False, {0: ELSEWHERE, 2: GONE, 3: ELSEWHERE}, StoreGone("gone"), (0, 1, 2), (0,), GONE_LINE),
        (1, 0, False, {0: ELSEWHERE, 2: HERE}, OSError("reset"), (0, 1, 2), (0,), GONE_LINE),
        # rank 0 lives, and has left its process group
        (
            1,
            0,
            False,
            {0: HERE, 2: GONE, 3: ELSEWHERE},
            StoreGone("gone"),
            (0, 1, 2),
            (2,),
            "  rank 2: the process is gone",
        ),
        (
            0,
            0,
            False,
            {1: HERE, 2: GONE, 3: ELSEWHERE},
            StoreGone("gone"),
            (0, 2),
            (2,),
            "  rank 2: the process is gone",
        ),
        (1, 0, False, {0: HERE, 2: HERE, 3: ELSEWHERE}, StoreGone("gone"), (0, 1, 2), (0,), GONE_LINE),
        (0, 0, False, {1: HERE, 2: HERE, 3: ELSEWHERE}, StoreGone("gone"), (0, 2), (0,), GONE_LINE),
        # it is in no group of this rank's
        (1, 0, False, {2: GONE}, StoreGone("gone"), (1, 2), (2,), "  rank 2: the process is gone"),
        (1, 0, False, {2: HERE}, StoreGone("gone"), (1, 2), (0,), GONE_LINE),
        # stopped, on this host or another one: who listens can be reached
        (1, 0, True, {0: HERE, 3: ELSEWHERE}, STOPPED, (0, 1, 2, 3), (0,), SILENT_LINE),
        (1, 0, True, {0: ELSEWHERE, 3: ELSEWHERE}, STOPPED, (0, 1, 3), (0,), SILENT_LINE),
        (1, None, True, {0: HERE, 3: ELSEWHERE}, STOPPED, (1, 2, 3), (), "  who is missing cannot be told"),
        (1, 0, None, {0: ELSEWHERE}, STOPPED, (0, 1), (0,), "cut off: the store does not answer; rank 0 of other"),
        (1, 0, None, {0: HERE, 3: ELSEWHERE}, STOPPED, (1, 2, 3), (3,), "cut off: the store does not answer; rank 3"),
        (1, 0, None, {0: HERE, 3: ELSEWHERE}, STOPPED, (1, 2), (0,), SILENT_LINE),
        (0, 0, None, {1: HERE}, STOPPED, (0, 1), (), "  who is missing cannot be told"),
        (1, None, None, {0: HERE, 3: ELSEWHERE}, STOPPED, (1, 2), (), "  who is missing cannot be told"),
    ],
)
def test_without_the_store(
    rank: int,
    host: int | None,
    served: bool | None,
    peers: dict[int, ProcessId],
    error: OSError,
    ranks: tuple[int, ...],
    missing: tuple[int, ...],
    line: str,
) -> None:
    with listening(served) as address:
        store = BoundedStore(HashStore, address=address, host_rank=host)
        mine = Roster(store, rank, range(4), peers)
        lost = mine.known_alone(error, ranks)
    assert lost.missing == missing
    assert line in "\n".join(mine.told_alone(lost))


@contextlib.contextmanager
def listening(served: bool | None) -> Iterator[tuple[str, int] | None]:
    """An address where somebody listens, nobody does, or of which nothing is known."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
        if served is False:
            server.close()
        yield None if served is None else address
