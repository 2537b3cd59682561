"""Who is told when a rank raises, and whose process may be ended for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats import RankMissing
from ddpstats._agreement.channel import Channel
from ddpstats._transport.comm import CommFailed
from ddpstats.capture._peers import Peers
from ddpstats.errors import ConfigError
from ddpstats.testing import run_ranks
from tests.capture import peers_runs as runs

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"


def peers_of(store: object, rank: int) -> Peers:
    def connect(timeout_sec: float) -> None:
        raise CommFailed("no connection in this test")

    return Peers(Channel((0, 1), rank, "a group", connect, store))  # type: ignore[arg-type]


def test_ranks_that_all_raise_and_catch_it_do_not_go_on_and_are_not_ended(tmp_path: Path) -> None:
    outcomes = run_ranks(runs.all_raise_and_go_on, 2, str(tmp_path), timeout_sec=50)
    first, second = outcomes.values()
    assert first == second  # the first one to announce is the one that all name
    assert len(first) == 2
    assert first[0] == first[1]
    assert "raised in step 0, micro-batch 0: ValueError: of rank " in first[0]


def test_a_reducer_that_timed_out_ends_nobody(tmp_path: Path) -> None:
    (lost, first), (_, second) = run_ranks(runs.stats_broke, 2, str(tmp_path), timeout_sec=50).values()
    assert "rank 1: did not take part" in lost
    assert first == second == lost


def test_a_rank_learns_of_it_before_its_next_micro_batch(tmp_path: Path) -> None:
    first, second = run_ranks(runs.learns_before_it_begins, 2, str(tmp_path), timeout_sec=40).values()
    assert first == second
    assert "rank 1 raised in step 0, micro-batch 0: ValueError: label 17 of 3" in first


def test_a_rank_that_computes_is_not_ended(tmp_path: Path) -> None:
    first, _ = run_ranks(runs.busy_while_another_raised, 2, str(tmp_path), timeout_sec=40).values()
    assert first > 0


def test_what_was_announced_is_not_what_broke_a_reduction() -> None:
    store = HashStore()
    one, other = peers_of(store, 0), peers_of(store, 1)
    other._channel._mailbox.leave(lambda missing, dead: "a reduction broke")  # type: ignore[union-attr]
    one.refuse_if_ended()
    assert one.explain(RuntimeError("mine")) is None
    one._looked -= 60
    other.announce(ValueError("label 17 of 3"), "step 4", None)
    with pytest.raises(RankMissing, match="rank 1 raised in step 4: ValueError: label 17 of 3"):
        one.refuse_if_ended()
    with pytest.raises(RankMissing, match="rank 1 raised in step 4"):
        other.refuse_if_ended()
    found = one.explain(RuntimeError(GLOO))
    assert found is not None
    assert found.missing_ranks == (1,)


def test_the_first_one_to_announce_is_named_by_all() -> None:
    store = HashStore()
    one, other = peers_of(store, 0), peers_of(store, 1)
    other.announce(ValueError("b"), "step 4", None)
    one.announce(ValueError("a"), "step 4", None)
    for peers in (one, other):
        with pytest.raises(RankMissing, match="rank 1 raised in step 4: ValueError: b"):
            peers.refuse_if_ended()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError(GLOO.replace("Connection closed by peer", "Timed out waiting 1000ms for recv")), True),
        (RankMissing("rank 1 is gone"), True),
        (dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: This usually reflects invalid usage"), False),
        (dist.DistError("my own"), False),
        (RuntimeError("Caught BrokenPipeError in DataLoader worker process 0.\n[Errno 32] Broken pipe"), False),
        (RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\n{GLOO}"), False),
        (RuntimeError("Connection reset by peer"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (ConfigError(GLOO), False),
    ],
    ids=range(12),
)
def test_a_lost_connection(error: Exception, lost: bool) -> None:
    assert peers_of(HashStore(), 0).is_lost_connection(error) is lost
