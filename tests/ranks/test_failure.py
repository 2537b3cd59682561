"""All ranks get one verdict on a failed collective, and it names the rank that is missing, dead or late."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._ranks import failure
from ddpstats._ranks.failure import (
    PROCESS_ID_BYTES,
    Answer,
    FailureDetector,
    Membership,
    ProcessId,
    Verdict,
    find_missing,
)
from ddpstats._ranks.store import BoundedStore, StoreLog, StoreSilent, bounded
from ddpstats.testing.threads import in_process
from tests.programs import Program
from tests.ranks.clock import Clock
from tests.ranks.processes import LINUX, id_of, state_of, wait_until_ended

# -- what backends say ------------------------------------------------------------------------------------------------

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
ABORTED = "NCCL communicator was aborted on rank 0."
CLOSED, LOST, SURE = failure.CLOSED, failure.LOST, failure.LOST_BY_BACKEND


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        (GLOO + "Connection closed by peer [127.0.0.1]:39487", {CLOSED, LOST, SURE}),
        (GLOO + "Read error [127.0.0.1]:4711: Connection reset by peer", {CLOSED, LOST, SURE}),
        (GLOO + "Socket closed by peer", {CLOSED, LOST, SURE}),
        (GLOO + "writev [127.0.0.1]:4711: Broken pipe", {CLOSED, LOST, SURE}),
        ("Read error Connection reset by peer. This is typically caused by a remote worker crashing", {CLOSED, LOST}),
        ("Connection was closed", {CLOSED, LOST}),
        ("Connection closed by remote peer", {CLOSED, LOST, SURE}),
        (GLOO + "Timed out waiting 4000ms for recv operation to complete", {LOST, SURE}),
        (GLOO + "Application timeout caused pair closure", {LOST, SURE}),
        ("Rank 0 failed to pass monitoredBarrier in 1000 ms", {LOST}),
        ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed", {LOST}),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting", {LOST, SURE}),
        ("Some NCCL operations have failed or timed out.", {LOST, SURE}),
        (ABORTED, {LOST, SURE}),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)", {LOST, SURE}),
        (ABORTED + " Original reason for failure was: ncclUnhandledCudaError", set()),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", set()),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", set()),
        ("[enforce fail at /pytorch/third_party/gloo/gloo/allreduce.cc:22] inputs.size() == outputs.size()", set()),
        ("shape mismatch", set()),
    ],
)
def test_what_a_backend_says_of_another_rank(text: str, patterns: set[Any]) -> None:
    reason = failure.nccl_reason(text)
    assert {pattern for pattern in (CLOSED, LOST, SURE) if pattern.search(reason)} == patterns


# -- processes --------------------------------------------------------------------------------------------------------


@LINUX
def test_this_process_is_alive_and_its_id_travels() -> None:
    own = ProcessId.mine()
    assert (own.pid, own.is_dead(), own.is_alive()) == (os.getpid(), False, True)
    assert own.started > 0
    assert len(own.pack()) == PROCESS_ID_BYTES
    assert ProcessId.unpack(own.pack()) == own


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


# -- the ranks of a group ---------------------------------------------------------------------------------------------


def membership(store: BoundedStore, rank: int) -> Membership:
    return Membership(store, rank, range(4))


def test_ranks_that_join_later_are_learnt_and_then_the_store_is_not_asked() -> None:
    store = in_process(HashStore())
    store.set(f"processes/{ProcessId.mine().machine.hex()}/3", "3 abc")  # garbage
    first = membership(store, 0)
    first.join()
    for rank in range(1, 4):
        assert not first.learn()
        assert first.peers == dict.fromkeys(range(1, rank), ProcessId.mine())
        assert first.absent() == list(range(rank, 4))
        membership(store, rank).join()
    assert first.learn()
    assert set(first.peers) == {1, 2, 3}
    store.use = None  # type: ignore[assignment,method-assign]
    assert first.learn()


@LINUX
def test_process_of_many_ranks_is_looked_at_once() -> None:
    """64 threads that read their process once for each other one waited seconds for each other (measured)."""
    members = Membership(in_process(HashStore()), 0, range(64), dict.fromkeys(range(1, 64), ProcessId.mine()))
    with mock.patch.object(failure, "_start_time", wraps=failure._start_time) as reads:
        assert members.alive() == list(range(64))
        assert members.dead() == set()
    assert reads.call_count <= 6  # two of each look, and what `ProcessId.mine` reads


def test_store_that_is_silent_for_a_moment_loses_no_rank_of_this_host() -> None:
    store = in_process(HashStore())
    members = [membership(store, rank) for rank in range(4)]
    for each in members:
        each.join()
    with mock.patch.object(store, "multi_get", side_effect=StoreSilent("late")), pytest.raises(StoreSilent):
        members[0].learn()
    members[0].learn()
    assert set(members[0].peers) == {1, 2, 3}


def test_rank_that_died_while_it_joined_hides_no_other() -> None:
    store = in_process(HashStore())
    store.add(f"processes/{ProcessId.mine().machine.hex()}", 1)  # and no more
    membership(store, 1).join()
    first = membership(store, 0)
    first.learn()
    assert set(first.peers) == {1}


HERE = ProcessId.mine()
GONE = dataclasses.replace(HERE, started=HERE.started - 1)
CLOSED_STORE, SILENT = OSError("Connection reset by peer"), StoreSilent("no answer in time")

SERVER_GONE = (0,), "  rank 0: is gone, and the store with it"
SERVER_CLOSED = (0,), "  rank 0: serves the store no more"
SERVER_SILENT = (0,), "  rank 0: serves the store, which does not answer"
RANK_2_GONE = (2,), "  rank 2: the process is gone"
NOT_KNOWN = (), "  which rank is missing cannot be determined"

# This rank, the rank that serves the store, the processes that this rank knows, how the store failed, the ranks that
# this rank waits for; and its conclusion.
WITHOUT_STORE: list[tuple[int, int | None, dict[int, ProcessId], OSError, tuple[int, ...], Any]] = [
    (1, 0, {0: GONE, 2: HERE}, CLOSED_STORE, (0, 1, 2), SERVER_GONE),
    (1, 0, {0: GONE, 2: GONE}, CLOSED_STORE, (0, 1, 2), SERVER_GONE),
    (1, 0, {2: GONE}, CLOSED_STORE, (0, 1, 2), SERVER_CLOSED),
    (1, 0, {2: HERE}, CLOSED_STORE, (0, 1, 2), SERVER_CLOSED),
    # rank 0 lives, and has left its process group
    (1, 0, {0: HERE, 2: GONE}, CLOSED_STORE, (0, 1, 2), RANK_2_GONE),
    (0, 0, {1: HERE, 2: GONE}, CLOSED_STORE, (0, 2), RANK_2_GONE),
    (1, 0, {0: HERE, 2: HERE}, CLOSED_STORE, (0, 1, 2), SERVER_CLOSED),
    (0, 0, {1: HERE, 2: HERE}, CLOSED_STORE, (0, 2), NOT_KNOWN),
    # it is in no group of this rank's
    (1, 0, {2: GONE}, CLOSED_STORE, (1, 2), RANK_2_GONE),
    (1, 0, {2: HERE}, CLOSED_STORE, (1, 2), SERVER_CLOSED),
    # it is stopped, or this host is cut off
    (1, 0, {0: HERE}, SILENT, (0, 1, 2, 3), SERVER_SILENT),
    (1, 0, {}, SILENT, (0, 1, 3), SERVER_SILENT),
    (1, 0, {0: HERE, 2: GONE}, SILENT, (0, 1, 2, 3), RANK_2_GONE),
    (0, 0, {1: HERE}, SILENT, (0, 1), NOT_KNOWN),
    # no rank serves the store
    (1, None, {0: HERE}, SILENT, (1, 2, 3), NOT_KNOWN),
    (1, None, {0: HERE}, CLOSED_STORE, (1, 2), NOT_KNOWN),
    (1, None, {0: HERE, 2: GONE}, CLOSED_STORE, (1, 2), RANK_2_GONE),
]


@LINUX
@pytest.mark.parametrize(("rank", "host", "peers", "error", "ranks", "conclusion"), WITHOUT_STORE)
def test_conclusion_when_the_store_is_gone(
    clock: Clock,
    rank: int,
    host: int | None,
    peers: dict[int, ProcessId],
    error: OSError,
    ranks: tuple[int, ...],
    conclusion: tuple[tuple[int, ...], str],
) -> None:
    members = Membership(BoundedStore(HashStore, host_rank=host), rank, range(4), peers)
    loss = members.diagnose_without_store(error, ranks)
    assert (loss.missing, loss.line) == conclusion
    assert clock.now < 1.1


# -- which ranks are missing: a function of what is known --------------------------------------------------------------

BROKEN, OVER = False, True

# The answers of ranks 0 to 3 to the failure of collective 5, whether the deadline is over, and the missing ranks.
ANSWERS: list[tuple[dict[int, Answer], bool, tuple[int, ...] | None]] = [
    ({0: Answer(5, ()), 1: Answer(5, ()), 2: Answer(5, ())}, OVER, (3,)),
    ({0: Answer(5, ()), 1: Answer(6, ()), 2: Answer(10, ())}, OVER, (3,)),  # a later one: it took part in this one
    ({0: Answer(5, ()), 1: Answer(4, ()), 2: Answer(5, ())}, OVER, (1, 3)),
    # All wait: the connection is what failed.
    (dict.fromkeys(range(4), Answer(5, ())), BROKEN, ()),
    ({0: Answer(5, ()), 1: Answer(5, ()), 2: Answer(5, ()), 3: Answer(4, ())}, BROKEN, None),
    # A connection broke: no rank of its host sees rank 3 alive.
    ({0: Answer(5, (0, 1)), 1: Answer(5, (0, 1)), 2: Answer(5, (2,))}, BROKEN, (3,)),
    # Rank 1 is late, and rank 0 sees it alive; rank 2 waits, and its host's rank 3 is gone.
    ({0: Answer(5, (0, 1)), 2: Answer(5, (2,))}, BROKEN, (3,)),
    ({0: Answer(5, (0, 1)), 2: Answer(5, (2, 3))}, BROKEN, None),
    ({0: Answer(5, (0, 1)), 2: Answer(5, (2, 3))}, OVER, (1, 3)),
    ({0: Answer(5, ()), 1: Answer(4, ()), 2: Answer(5, (2, 3))}, BROKEN, None),
    # Ranks 2 and 3 are alone on their hosts: no rank can say which of them is gone.
    ({0: Answer(5, (0, 1))}, BROKEN, (2, 3)),
]


@pytest.mark.parametrize(("answers", "is_over", "missing"), ANSWERS)
def test_missing_ranks_are_those_that_neither_wait_nor_are_seen(
    answers: dict[int, Answer], is_over: bool, missing: tuple[int, ...] | None
) -> None:
    assert find_missing(range(4), 5, answers, is_over=is_over) == missing


# -- notes are bytes from another process ------------------------------------------------------------------------------


def detector(store: Any, rank: int, ranks: tuple[int, ...] = (0, 1), **options: Any) -> FailureDetector:
    store = in_process(store) if isinstance(store, HashStore) else store
    return FailureDetector(store, rank, ranks, "the test", closing="The group is closed.", **options)


def decide(detector: FailureDetector, seq: int = 1, within_sec: float = 0.0, **how: bool) -> Verdict:
    now: float = vars(failure)["time"].monotonic()  # of the clock, where there is one
    how = {"is_broken": False, **how}
    return detector.decide(seq, "a reason", **how, started=now, deadline=now + within_sec)


def answer(detector: FailureDetector, seq: int) -> None:
    """Answer that the rank waits in that collective."""
    StoreLog(detector.store, "report").append(detector.rank, Answer(seq, ()).pack())


def missing_text(
    rank: int, after: str, *lines: str, reason: str = "a reason", look_at: str = "the output of the missing ranks"
) -> str:
    return "\n".join(
        [
            f"the test was not completed after {after} s:",
            *lines,
            f"rank {rank} waited and saw: {reason}",
            f"Look at {look_at} first. A rank that is only slow needs a larger timeout_sec "
            "(or DDPSTATS_TIMEOUT_SEC). The group is closed.",
        ]
    )


@pytest.mark.parametrize(("second_waits_in", "missing"), [(2, (0,)), (1, (2,))])
def test_a_rank_that_had_no_time_left_is_missing_where_another_waits_for_it(
    clock: Clock, second_waits_in: int, missing: tuple[int, ...]
) -> None:
    """This holds also where it judges itself. Where all ranks are late, the one that never answers is missing."""
    store, ranks = HashStore(), (0, 1) if second_waits_in == 2 else (0, 1, 2)
    first, second = detector(store, 0, ranks), detector(store, 1, ranks)
    answer(second, second_waits_in)
    assert decide(first, 1, 1.0, is_late=True).missing == missing


GARBAGE = [
    b"",
    b"\xff\xfe\x00",
    b"[" * 60_000,
    b"[1]",
    b'{"missing": [1]}',
    b'{"message": "x"}',
    b'{"message": "x", "missing": [true]}',
    b'{"message": "x", "missing": [' + b"1" * 5000 + b"]}",
    b'{"message": "' + b"x" * (1 << 20) + b'", "missing": []}',
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: f"{garbage[:40]!r} of {len(garbage)}")
def test_garbage_in_the_store_is_no_verdict(clock: Clock, garbage: bytes) -> None:
    """It ends neither a wait nor the rank, which says in the end that the store does not answer."""
    with pytest.raises(ValueError, match=r"."):
        Verdict.unpack(garbage)
    store = HashStore()
    store.set("verdict", garbage)  # type: ignore[arg-type]  # str in the stubs; bytes work
    first = detector(store, 0)
    assert first.poll() is None
    verdict = decide(first)
    assert verdict.missing == ()
    assert "\nThe store, which could say which rank is missing, does not answer: " in verdict.message
    assert len(verdict.message) < 1000


@pytest.mark.parametrize("garbage", [b"", b"soon", b"5", b'{"seq": 5}', b'{"seq": 5.0, "alive": ["1"]}'])
def test_garbage_is_no_answer(clock: Clock, garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Answer.unpack(garbage)
    store = HashStore()
    first = detector(store, 0)
    StoreLog(first.store, "report").append(1, garbage)
    assert decide(first).missing == ()


@given(st.lists(st.integers(0, 100_000), max_size=20).map(tuple), st.text(max_size=100))
def test_every_note_that_is_written_can_be_read(ranks: tuple[int, ...], message: str) -> None:
    assert Verdict.unpack(Verdict(ranks, message).pack().encode()) == Verdict(ranks, message)
    assert Answer.unpack(Answer(7, ranks).pack().encode()) == Answer(7, ranks)


# -- one verdict -----------------------------------------------------------------------------------------------------


def test_first_verdict_written_is_that_of_all_ranks() -> None:
    store, ranks = HashStore(), tuple(range(9))
    start = threading.Barrier(8)

    def settle(rank: int) -> Verdict:
        start.wait(10)
        now = time.monotonic()
        return detector(store, rank, ranks).decide(1, f"{rank}", is_broken=False, started=now, deadline=now + 0.5)

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(settle, range(8)))
    assert len(set(verdicts)) == 1
    assert verdicts[0].missing == (8,)
    assert detector(store, 8, ranks).read() == verdicts[0]


def test_late_rank_gets_the_verdict_at_once(clock: Clock) -> None:
    store = HashStore()
    first = decide(detector(store, 0), 3)
    decided = clock.now
    late = detector(store, 1)
    assert late.poll() == "another rank has given up"
    assert decide(late, 3, 60.0) == first
    assert late.rendezvous(clock.now + 60, 1) == first
    assert clock.now - decided < 0.1


def test_note_of_a_missing_rank_is_in_the_verdict_until_it_is_taken_back(clock: Clock) -> None:
    store = HashStore()
    first, second = detector(store, 0), detector(store, 1)
    assert first.explain("connection closed") is None
    second.note("rank 1 raised ValueError")
    second.note("")
    assert first.explain("connection closed") is None
    second.note("rank 1 raised KeyError")
    verdict = decide(first, within_sec=3.0)
    assert verdict.missing == (1,)
    assert "  rank 1: did not take part\nrank 1 raised KeyError\nrank 0 waited" in verdict.message


def test_note_of_a_rank_that_waits_is_in_the_verdict_on_another_one(clock: Clock) -> None:
    """Rank 0's device may wait for what rank 1 left out when it raised: rank 0 is late, and rank 1 the reason."""
    store = HashStore()
    first, second = detector(store, 0), detector(store, 1)
    second.note("rank 1 raised KeyError")
    StoreLog(second.store, "report").append(1, Answer(2, (), "rank 1 raised KeyError").pack())
    verdict = decide(first, 1, within_sec=3.0, is_late=True)
    assert verdict.missing == (0,)
    assert "  rank 0: did not take part\nrank 1 raised KeyError\nrank 0 waited" in verdict.message
    late = detector(store := HashStore(), 1)
    late.note("rank 1 raised KeyError")
    answer(detector(store, 0), 1)
    assert "rank 1 raised KeyError" in decide(late, 2, within_sec=3.0).message


def test_notes_explain_a_connection_that_broke_and_the_first_explanation_is_that_of_all() -> None:
    store, ranks = HashStore(), (0, 1, 2)
    detector(store, 2, ranks).note("rank 2 raised KeyError")
    first = detector(store, 0, ranks).explain("connection closed")
    text = "rank 2 raised KeyError\nrank 0 waited and saw: connection closed\nThe group is closed."
    assert first == Verdict((2,), text)
    assert detector(store, 1, ranks).explain("connection reset") == first == detector(store, 2, ranks).read()


def test_verdict_comes_at_the_deadline_and_spares_a_rank_that_waits_by_then(clock: Clock) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    second = detector(store, 1, ranks)
    clock.at(9.5, lambda: answer(second, 5))
    assert decide(detector(store, 0, ranks), 5, 10.0).missing == (2,)
    assert 10.0 <= clock.now < 10.5


def test_no_rank_is_missing_where_all_wait_and_a_connection_broke(clock: Clock) -> None:
    store = HashStore()
    answer(detector(store, 1), 5)
    verdict = decide(detector(store, 0), 5, 60.0, is_broken=True)
    line = "  no rank is known to be missing; the connection between ranks failed"
    look_at = "the output of all ranks and at the network"
    assert verdict == Verdict((), missing_text(0, "2.5", line, look_at=look_at))
    assert clock.now < 4.0


def test_broken_connection_names_the_rank_that_no_other_sees_alive(clock: Clock) -> None:
    """Rank 2 is alone on its host; rank 1 is late, and rank 0 sees its process."""
    first = detector(HashStore(), 0, (0, 1, 2), peers={1: HERE})
    assert decide(first, 5, 300.0, is_broken=True).missing == (2,)
    assert 1.0 < clock.now < 4.0


def test_broken_connection_waits_for_ranks_that_are_seen_alive(clock: Clock) -> None:
    first = detector(HashStore(), 0, peers={1: HERE})
    assert decide(first, 5, 100.0, is_broken=True).missing == (1,)
    assert 100.0 <= clock.now < 101.0


def test_rank_that_only_waits_believes_the_connection_that_broke_on_another(clock: Clock) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    store.set("alarm", "broken")
    store.set("judge", "1")  # which died since
    assert decide(detector(store, 0, ranks), 5, 300.0).missing == (1, 2)
    assert clock.now < 5.0


def test_rank_that_serves_the_store_stays_until_the_others_have_read_the_verdict() -> None:
    """It may raise and exit: the others would find no store, and name this rank."""
    store, ranks = in_process(HashStore()), (0, 1, 2, 3)
    store.host_rank = 0
    servant, second, third = (detector(store, rank, ranks) for rank in (0, 1, 2))
    for waiting in (second, third):
        answer(waiting, 1)
    with ThreadPoolExecutor(1) as threads:
        returned = threads.submit(decide, servant)
        verdicts = []
        for reader in (second, third):
            time.sleep(0.2)
            assert not returned.done()
            verdicts.append(reader.read())
        assert verdicts == [returned.result(10)] * 2
    assert verdicts[0] is not None
    assert verdicts[0].missing == (3,)


def test_rank_that_serves_the_store_does_not_stay_for_a_rank_that_never_reads(clock: Clock) -> None:
    store = in_process(HashStore())
    store.host_rank = 0
    decide(detector(store, 0, (0, 1, 2), peers={2: HERE}), within_sec=10.0)
    assert clock.now < 13.0


# -- the first use ---------------------------------------------------------------------------------------------------


@LINUX
def test_rank_that_dies_while_others_are_waited_for_is_known_at_once(clock: Clock, child: Program) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    process = id_of(child.pid)
    with mock.patch.object(ProcessId, "mine", return_value=process):
        Membership(bounded(store), 1, ranks).join()

    def kill() -> None:
        os.kill(child.pid, signal.SIGKILL)
        wait_until_ended(child.pid)

    clock.at(3.0, kill)
    verdict = detector(store, 0, ranks).rendezvous(60.0, 1.0)
    assert verdict is not None
    assert verdict.missing == (1,)
    assert "  rank 1: the process is gone\n" in verdict.message
    assert clock.now < 4.5


# -- dead processes --------------------------------------------------------------------------------------------------


@LINUX
def test_death_on_one_host_is_known_at_once_on_the_others(clock: Clock, child: Program) -> None:
    store, ranks = HashStore(), (0, 1, 2)
    neighbour = detector(store, 0, ranks, peers={1: HERE, 2: id_of(child.pid)})
    assert neighbour.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    wait_until_ended(child.pid)
    assert neighbour.poll() == neighbour.find_dead() == "the process of rank 2 is gone"
    verdict = decide(neighbour, 4, 60.0)
    assert verdict == Verdict((2,), missing_text(0, "0.1", "  rank 2: the process is gone"))
    assert decide(detector(store, 1, ranks), 4, 60.0) == verdict
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
    first = detector(lost_store, 0)
    assert first.poll() is None
    for verdict in (decide(first, 1, 60.0), first.rendezvous(clock.now + 60, 1), first.leave("MemoryError")):
        assert verdict is not None
        assert verdict.missing == ()
        lines = verdict.message.splitlines()
        assert lines[:2] == ["the test was not completed:", "  which rank is missing cannot be determined"]
        assert lines[2] == "Look at the output of all ranks and at the network first. The group is closed."
        assert lines[3].startswith("The store, which could say which rank is missing, does not answer: ")
        assert len(lines) == 4
    assert clock.now < 10.0


def test_conclusion_without_the_store_is_the_verdict_of_the_rank_that_was_stopped_and_served_it() -> None:
    kept, is_served = HashStore(), threading.Event()

    class Stopped:
        """Answers nothing until it goes on."""

        def __getattr__(self, name: str) -> Any:
            is_served.wait(30)
            return getattr(kept, name)

    store = BoundedStore(Stopped, host_rank=0)
    with mock.patch("ddpstats._ranks.failure._WRITE_SEC", 0.0), mock.patch("ddpstats._ranks.failure._YIELD_SEC", 0.0):
        verdict = decide(detector(store, 1), 1, 0.1)
    assert verdict.missing == (0,)
    assert "rank 0: serves the store, which does not answer" in verdict.message
    is_served.set()
    servant = detector(kept, 0)
    deadline = time.monotonic() + 10
    while (read := servant.read()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read == verdict


class SlowStore:
    """Each answer takes 0.3 s of the clock, as on a machine that is busy."""

    def __init__(self, clock: Clock) -> None:
        self._store, self._clock = HashStore(), clock

    def __getattr__(self, name: str) -> Any:
        self._clock.sleep(0.3)
        return getattr(self._store, name)


def test_store_that_answers_late_still_takes_the_verdict(clock: Clock) -> None:
    """When the deadline comes, it is still to be written."""
    assert decide(detector(SlowStore(clock), 0), 5, 1.6).missing == (1,)
    assert clock.now < 2 * 1.6 + 1.5
