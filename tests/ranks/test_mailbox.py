"""`Mailbox` gives all ranks one verdict on a failed collective, through the store, at its deadline."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._ranks.mailbox import GroupVerdict, Mailbox, _parse
from ddpstats._ranks.roster import ProcessId, Roster
from ddpstats._ranks.store import bounded
from tests.programs import Program
from tests.ranks.clock import Clock
from tests.ranks.processes import LINUX, id_of, wait_until_ended


def describe(missing: tuple[int, ...], dead: tuple[int, ...]) -> str:
    return f"missing {missing}, dead {dead}"


# -- a verdict is bytes from another process -------------------------------------------------------------------------


def test_verdict_survives_the_way_there_and_back() -> None:
    mailbox = Mailbox(HashStore(), 0, (0, 1, 2))
    assert mailbox.read() is None
    assert mailbox.decide_verdict(1, time.monotonic(), describe) == GroupVerdict((1, 2), "missing (1, 2), dead ()")
    assert mailbox.read() == GroupVerdict((1, 2), "missing (1, 2), dead ()")


@pytest.mark.parametrize(
    "message", ["", "two\nlines", "\0 \ud800 \U0001f600", 'quote " and backslash \\', "x" * 10_000], ids=len
)
def test_any_text_may_be_in_a_verdict(message: str) -> None:
    mailbox = Mailbox(HashStore(), 0, (0, 1))
    assert mailbox.decide_verdict(1, time.monotonic(), lambda missing, dead: message) == GroupVerdict((1,), message)
    assert Mailbox(mailbox.store, 1, (0, 1)).read() == GroupVerdict((1,), message)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[" * 60_000,
        b"null",
        b"[1]",
        b'{"missing": [1]}',
        b'{"message": "x"}',
        b'{"message": 1, "missing": []}',
        b'{"message": "x", "missing": 1}',
        b'{"message": "x", "missing": [true]}',
        b'{"message": "x", "missing": [1.0]}',
        b'{"message": "x", "missing": ["1"]}',
        b'{"message": "x", "missing": [' + b"1" * 5000 + b"]}",
        b'{"message": "' + b"x" * (1 << 20) + b'", "missing": []}',
    ],
    ids=lambda garbage: f"{garbage[:40]!r} of {len(garbage)}",
)
def test_garbage_in_the_store_is_no_verdict(clock: Clock, garbage: bytes) -> None:
    """It ends neither a wait nor the rank; the rank goes on, and says in the end that the store cannot tell."""
    with pytest.raises(ValueError, match=r"."):
        _parse(garbage)
    store = HashStore()
    store.set("verdict", garbage)  # type: ignore[arg-type]  # str in the stubs; bytes work
    mailbox = Mailbox(store, 0, (0, 1))
    assert mailbox.poll_verdict(1) is None
    verdict = mailbox.decide_verdict(1, clock.now, describe)
    assert verdict.missing == ()
    assert verdict.message.startswith(
        "missing (), dead ()\nThe store, which could tell who is missing, does not answer: "
    )
    assert len(verdict.message) < 1000


@given(st.binary(max_size=200) | st.text(max_size=50).map(lambda text: json.dumps({"message": text}).encode()))
def test_random_bytes_are_refused_by_valueerror_alone(payload: bytes) -> None:
    try:
        found = _parse(payload)
    except ValueError:
        return
    raise AssertionError(f"{payload!r} was read as {found}")


@given(st.lists(st.integers(0, 100_000), max_size=20), st.text(max_size=100))
def test_every_verdict_that_is_written_can_be_read(missing: list[int], message: str) -> None:
    payload = json.dumps({"missing": missing, "message": message})
    assert _parse(payload) == _parse(payload.encode()) == GroupVerdict(tuple(missing), message)


# -- one verdict -----------------------------------------------------------------------------------------------------


def test_first_verdict_written_is_that_of_all_ranks() -> None:
    store, ranks = HashStore(), tuple(range(8))
    start = threading.Barrier(8)

    def settle(rank: int) -> GroupVerdict:
        start.wait(10)
        mailbox = Mailbox(store, rank, (*ranks, 8))
        return mailbox.decide_verdict(1, time.monotonic(), lambda missing, dead: f"rank {rank} says so")

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(settle, ranks))
    assert len(set(verdicts)) == 1
    assert verdicts[0].message in {f"rank {rank} says so" for rank in ranks}
    assert Mailbox(store, 8, (*ranks, 8)).read() == verdicts[0]


def test_late_rank_gets_the_verdict_at_once(clock: Clock) -> None:
    store = HashStore()
    first = Mailbox(store, 0, (0, 1)).decide_verdict(3, 0.0, describe)
    decided = clock.now
    late = Mailbox(store, 1, (0, 1))
    assert late.poll_verdict(3) == first
    assert late.decide_verdict(3, decided + 60.0, describe) == first
    assert late.meet(60, 1, describe) == first
    assert clock.now - decided < 0.1


def test_rank_that_leaves_names_itself() -> None:
    store = HashStore()
    left = Mailbox(store, 1, (0, 1)).leave(lambda missing, dead: f"{missing} went away")
    assert left == GroupVerdict((1,), "(1,) went away")
    assert Mailbox(store, 0, (0, 1)).poll_verdict(1) == left


# -- who is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits_in", "decided", "missing"),
    [(5, 5, (2,)), (6, 5, (2,)), (4, 5, (1, 2)), (10, 9, (2,))],
    ids=["the same", "a later one: it took part in this one", "an earlier one", "numbers, not texts"],
)
def test_rank_that_waits_in_this_collective_or_a_later_one_is_not_missing(
    clock: Clock, waits_in: int, decided: int, missing: tuple[int, ...]
) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    Mailbox(store, 1, ranks).poll_verdict(waits_in)
    assert Mailbox(store, 0, ranks).decide_verdict(decided, 0.0, describe).missing == missing


def test_verdict_comes_at_the_deadline_and_spares_a_rank_that_came_just_before(clock: Clock) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    clock.at(9.5, lambda: Mailbox(store, 1, ranks).poll_verdict(5))
    assert Mailbox(store, 0, ranks).decide_verdict(5, 10.0, describe).missing == (2,)
    assert 10.0 <= clock.now < 10.5


def test_verdict_comes_early_once_all_ranks_wait(clock: Clock) -> None:
    """Then no rank is missing: the connection is what failed."""
    store, ranks = HashStore(), (0, 1)
    Mailbox(store, 1, ranks).poll_verdict(5)
    assert Mailbox(store, 0, ranks).decide_verdict(5, 60.0, describe) == GroupVerdict((), "missing (), dead ()")
    assert clock.now < 0.5


def test_garbage_where_a_rank_waits_is_reported(clock: Clock) -> None:
    store = HashStore()
    store.set("waiting/1", "soon")
    verdict = Mailbox(store, 0, (0, 1)).decide_verdict(5, clock.now, describe)
    assert verdict.missing == ()
    assert "does not answer: invalid literal" in verdict.message


# -- meeting ---------------------------------------------------------------------------------------------------------


def test_ranks_meet_in_any_order() -> None:
    store, ranks = HashStore(), tuple(range(6))

    def meet(rank: int) -> GroupVerdict | None:
        time.sleep(0.05 * rank)
        return Mailbox(store, rank, ranks).meet(30, 0.2, describe)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(meet, ranks)) == [None] * 6


def test_rank_that_never_comes_is_missing_at_the_timeout_and_hears_so_when_it_comes(clock: Clock) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    Roster(bounded(store), 1, ranks).join()
    verdict = Mailbox(store, 0, ranks).meet(10.0, 0.1, describe)
    assert verdict == GroupVerdict((2,), "missing (2,), dead ()")
    assert 10.0 <= clock.now < 10.6
    assert Mailbox(store, 2, ranks).meet(30.0, 1.0, describe) == verdict
    assert clock.now < 11.2


# -- dead processes --------------------------------------------------------------------------------------------------


@LINUX
def test_death_on_one_host_is_known_at_once_on_the_others(clock: Clock, child: Program) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    here = Mailbox(store, 0, ranks, {1: ProcessId.mine(), 2: id_of(child.pid)})
    elsewhere = Mailbox(store, 1, ranks)
    assert here.dead_peers() == set()
    os.kill(child.pid, signal.SIGKILL)
    wait_until_ended(child.pid)
    assert here.dead_peers() == {2}
    assert elsewhere.dead_peers() == set()
    assert elsewhere.decide_verdict(4, 60.0, describe) == GroupVerdict((2,), "missing (2,), dead (2,)")
    assert clock.now < 0.5


# -- the store is gone -----------------------------------------------------------------------------------------------


@pytest.fixture
def lost_store() -> Any:
    """A client whose server has ended."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5))
    store = PrefixStore("ddpstats", client)
    store.set("alive", "1")
    del server
    return store


def test_without_the_store_no_rank_is_named_and_the_text_says_why(clock: Clock, lost_store: Any) -> None:
    mailbox = Mailbox(lost_store, 0, (0, 1))
    assert mailbox.poll_verdict(1) is None
    verdicts = [
        mailbox.decide_verdict(1, 60.0, describe),
        mailbox.meet(60, 1, describe),
        mailbox.leave(describe),
    ]
    assert clock.now < 10.0
    for verdict in verdicts:
        assert verdict is not None
        assert verdict.missing == ()
        assert verdict.message.startswith(
            "missing (), dead ()\nThe store, which could tell who is missing, does not answer: "
        )
        assert verdict.message.count("\n") == 1


@LINUX
def test_dead_peer_is_still_seen_without_the_store(lost_store: Any, child: Program) -> None:
    mailbox = Mailbox(lost_store, 0, (0, 1), {1: id_of(child.pid)})
    os.kill(child.pid, signal.SIGKILL)
    wait_until_ended(child.pid)
    assert mailbox.dead_peers() == {1}


class SlowStore:
    """Each answer takes 0.3 s of the clock, as on a machine that is busy."""

    def __init__(self, clock: Clock) -> None:
        self._store, self._clock = HashStore(), clock

    def __getattr__(self, name: str) -> Any:
        self._clock.sleep(0.3)
        return getattr(self._store, name)


def test_store_that_answers_late_still_takes_the_verdict(clock: Clock) -> None:
    """When the deadline comes, it is still to be written."""
    verdict = Mailbox(SlowStore(clock), 0, (0, 1)).decide_verdict(5, 1.6, describe)
    assert verdict == GroupVerdict((1,), "missing (1,), dead ()")
    assert clock.now < 2 * 1.6 + 1.0
