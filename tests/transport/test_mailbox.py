"""What ranks tell each other through the store when no collective can be trusted."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._transport.mailbox import GroupVerdict, Mailbox, _parse
from ddpstats._transport.roster import ProcessId
from tests.transport.processes import LINUX, id_of

SLACK_SEC = 4.0  # for a machine that has other things to do


def describe(missing: tuple[int, ...], dead: tuple[int, ...]) -> str:
    return f"missing {missing}, dead {dead}"


def in_time(seconds: float) -> float:
    return time.monotonic() + seconds


# -- a verdict is bytes from another process -------------------------------------------------------------------------


def test_a_verdict_survives_the_way_there_and_back() -> None:
    mailbox = Mailbox(HashStore(), 0, (0, 1, 2))
    assert mailbox.read() is None
    assert mailbox.decide_verdict(1, in_time(0), describe) == GroupVerdict((1, 2), "missing (1, 2), dead ()")
    assert mailbox.read() == GroupVerdict((1, 2), "missing (1, 2), dead ()")


@pytest.mark.parametrize(
    "message", ["", "two\nlines", "\0 \ud800 \U0001f600", 'quote " and backslash \\', "x" * 10_000], ids=len
)
def test_any_text_may_be_in_a_verdict(message: str) -> None:
    mailbox = Mailbox(HashStore(), 0, (0, 1))
    assert mailbox.decide_verdict(1, in_time(0), lambda missing, dead: message) == GroupVerdict((1,), message)
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
def test_garbage_in_the_store_is_no_verdict(garbage: bytes) -> None:
    """It ends neither a wait nor the rank; the rank goes on, and says in the end that the store cannot tell."""
    with pytest.raises(ValueError, match=r"."):
        _parse(garbage)
    store = HashStore()
    store.set("verdict", garbage)  # type: ignore[arg-type]  # str in the stubs; bytes work
    mailbox = Mailbox(store, 0, (0, 1))
    assert mailbox.poll_verdict(1) is None
    verdict = mailbox.decide_verdict(1, in_time(0), describe)
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


def test_the_first_writer_wins_for_everybody() -> None:
    store, ranks = HashStore(), tuple(range(8))
    start = threading.Barrier(8)

    def settle(rank: int) -> GroupVerdict:
        start.wait(10)
        return Mailbox(store, rank, (*ranks, 8)).decide_verdict(
            1, in_time(0), lambda missing, dead: f"rank {rank} says so"
        )

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(settle, ranks))
    assert len(set(verdicts)) == 1
    assert verdicts[0].message in {f"rank {rank} says so" for rank in ranks}
    assert Mailbox(store, 8, (*ranks, 8)).read() == verdicts[0]


def test_a_late_rank_gets_the_verdict_at_once() -> None:
    store = HashStore()
    first = Mailbox(store, 0, (0, 1)).decide_verdict(3, in_time(0), describe)
    late = Mailbox(store, 1, (0, 1))
    started = time.monotonic()
    assert late.poll_verdict(3) == first
    assert late.decide_verdict(3, in_time(60), describe) == first
    assert late.meet(60, 1, describe) == first
    assert time.monotonic() - started < 2.0


def test_a_rank_that_leaves_names_itself() -> None:
    store = HashStore()
    left = Mailbox(store, 1, (0, 1)).leave(lambda missing, dead: f"{missing} went away")
    assert left == GroupVerdict((1,), "(1,) went away")
    assert Mailbox(store, 0, (0, 1)).poll_verdict(1) == left


# -- who is missing --------------------------------------------------------------------------------------------------


def test_who_waits_is_not_missing() -> None:
    store, ranks = HashStore(), (0, 1, 2)
    Mailbox(store, 1, ranks).poll_verdict(5)
    assert Mailbox(store, 0, ranks).decide_verdict(5, in_time(0), describe).missing == (2,)


def test_who_waits_in_a_later_collective_is_not_missing() -> None:
    """It took part in the one that failed here."""
    store, ranks = HashStore(), (0, 1, 2)
    Mailbox(store, 1, ranks).poll_verdict(6)
    assert Mailbox(store, 0, ranks).decide_verdict(5, in_time(0), describe).missing == (2,)


def test_who_waited_in_an_earlier_collective_is_missing() -> None:
    store, ranks = HashStore(), (0, 1, 2)
    Mailbox(store, 1, ranks).poll_verdict(4)
    assert Mailbox(store, 0, ranks).decide_verdict(5, in_time(0), describe).missing == (1, 2)


def test_numbers_are_compared_as_numbers() -> None:
    store = HashStore()
    Mailbox(store, 1, (0, 1)).poll_verdict(10)
    assert Mailbox(store, 0, (0, 1)).decide_verdict(9, in_time(0), describe).missing == ()


def test_nobody_is_blamed_before_the_deadline() -> None:
    store, ranks = HashStore(), (0, 1, 2)
    threading.Timer(0.3, Mailbox(store, 1, ranks).poll_verdict, [5]).start()
    started = time.monotonic()
    assert Mailbox(store, 0, ranks).decide_verdict(5, in_time(0.8), describe).missing == (2,)
    assert 0.7 < time.monotonic() - started < 0.8 + SLACK_SEC


def test_the_verdict_comes_early_once_all_wait() -> None:
    """Then nobody is missing: the connection is what failed."""
    store, ranks = HashStore(), (0, 1)
    Mailbox(store, 1, ranks).poll_verdict(5)
    started = time.monotonic()
    assert Mailbox(store, 0, ranks).decide_verdict(5, in_time(60), describe) == GroupVerdict((), "missing (), dead ()")
    assert time.monotonic() - started < SLACK_SEC


def test_garbage_where_a_rank_waits_is_reported() -> None:
    store = HashStore()
    store.set("waiting/1", "soon")
    verdict = Mailbox(store, 0, (0, 1)).decide_verdict(5, in_time(0), describe)
    assert verdict.missing == ()
    assert "does not answer: invalid literal" in verdict.message


# -- meeting ---------------------------------------------------------------------------------------------------------


def test_ranks_meet() -> None:
    store, ranks = HashStore(), tuple(range(6))

    def meet(rank: int) -> GroupVerdict | None:
        time.sleep(0.1 * rank)
        return Mailbox(store, rank, ranks).meet(30, 0.2, describe)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(meet, ranks)) == [None] * 6


def test_a_rank_that_never_comes_is_named_on_all_others() -> None:
    store, ranks = HashStore(), (0, 1, 2, 3)

    def meet(rank: int) -> GroupVerdict | None:
        time.sleep(0.3 * rank)
        return Mailbox(store, rank, ranks).meet(1.2 - 0.3 * rank, 0.1, describe)

    started = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        verdicts = list(threads.map(meet, ranks[:3]))
    assert time.monotonic() - started < 1.2 + SLACK_SEC
    assert verdicts == [GroupVerdict((3,), "missing (3,), dead ()")] * 3
    assert Mailbox(store, 3, ranks).meet(30, 1, describe) == verdicts[0]


# -- dead processes --------------------------------------------------------------------------------------------------


@LINUX
def test_a_dead_peer_is_told_to_the_other_hosts(child: subprocess.Popen[bytes]) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    here = Mailbox(store, 0, ranks, {1: ProcessId.mine(), 2: id_of(child.pid)})
    elsewhere = Mailbox(store, 1, ranks)
    assert here.dead_peers() == set()
    child.kill()
    child.wait(10)
    assert here.dead_peers() == {2}
    assert elsewhere.dead_peers() == set()
    started = time.monotonic()
    assert elsewhere.decide_verdict(4, in_time(60), describe) == GroupVerdict((2,), "missing (2,), dead (2,)")
    assert time.monotonic() - started < SLACK_SEC


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


def test_without_the_store_nobody_is_named_and_the_text_says_why(lost_store: Any) -> None:
    mailbox = Mailbox(lost_store, 0, (0, 1))
    started = time.monotonic()
    assert mailbox.poll_verdict(1) is None
    said = [
        mailbox.decide_verdict(1, in_time(60), describe),
        mailbox.meet(60, 1, describe),
        mailbox.leave(describe),
    ]
    assert time.monotonic() - started < 10 + SLACK_SEC
    for verdict in said:
        assert verdict is not None
        assert verdict.missing == ()
        assert verdict.message.startswith(
            "missing (), dead ()\nThe store, which could tell who is missing, does not answer: "
        )
        assert verdict.message.count("\n") == 1


@LINUX
def test_a_dead_peer_is_still_seen_without_the_store(lost_store: Any, child: subprocess.Popen[bytes]) -> None:
    mailbox = Mailbox(lost_store, 0, (0, 1), {1: id_of(child.pid)})
    child.kill()
    child.wait(10)
    assert mailbox.dead_peers() == {1}


class SlowStore:
    """Each answer takes a while, as on a machine that is busy."""

    def __init__(self) -> None:
        self._store: Any = HashStore()

    def __getattr__(self, name: str) -> Any:
        time.sleep(0.3)
        return getattr(self._store, name)


def test_a_store_that_answers_late_still_takes_the_verdict() -> None:
    """When the deadline comes, it is to be written yet."""
    started = time.monotonic()
    verdict = Mailbox(SlowStore(), 0, (0, 1)).decide_verdict(5, in_time(1.6), describe)
    assert verdict == GroupVerdict((1,), "missing (1,), dead ()")
    assert time.monotonic() - started < 1.6 + SLACK_SEC
