"""When a rank raises in its micro-batch, `NaNCapture` tells the others, and ends no process that goes on by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats import RankMissing
from ddpstats._ranks.calls import Channel
from ddpstats._ranks.comm import CommFailed
from ddpstats.capture._peers import Peers
from ddpstats.capture.bundle import Bundle
from ddpstats.errors import ConfigError
from ddpstats.testing import RankPool
from tests.capture import peers_runs as runs

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"


def test_ranks_that_all_raise_name_the_first_one_and_each_writes_its_own_bundle(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    first, second = two_ranks.run(runs.all_raise_and_go_on, str(tmp_path)).values()
    assert first == second
    assert first[0] == first[1]
    assert "raised in step 0, micro-batch 0: ValueError: of rank " in first[0]
    bundles = sorted(tmp_path.iterdir(), key=lambda path: path.name[-10:])
    assert [path.name[-10:] for path in bundles] == ["-rank00000", "-rank00001"]
    for rank, path in enumerate(bundles):
        manifest = json.loads((path / "MANIFEST.json").read_text())
        assert (manifest["reason"], manifest["ranks_present"], manifest["ranks"]) == ("exception", [rank], [0, 1])
        assert manifest["missing"] == {str(1 - rank): f"this bundle is rank {rank}'s alone: it raised"}
        assert Bundle.open(path).parameters(rank)


def test_a_rank_learns_that_another_raised_before_its_next_micro_batch(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.learns_before_it_begins, str(tmp_path)).values()
    assert first == second
    assert "rank 1 raised in step 0, micro-batch 0: ValueError: label 17 of 3" in first


@pytest.mark.slow
def test_a_reducer_that_timed_out_ends_no_process(two_ranks: RankPool, tmp_path: Path) -> None:
    (lost, first), (_, second) = two_ranks.run(runs.reducer_times_out, str(tmp_path)).values()
    assert "rank 1: did not take part" in lost
    assert first == second == lost


@pytest.mark.slow
def test_a_rank_that_computes_is_not_ended(two_ranks: RankPool, tmp_path: Path) -> None:
    first, _ = two_ranks.run(runs.computes_while_another_raised, str(tmp_path)).values()
    assert first > 0


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError(GLOO.replace("Connection closed by peer", "Timed out waiting 1000ms for recv")), True),
        (RankMissing("rank 1 is gone"), True),
        (dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: This usually reflects invalid usage"), False),
        (RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\n{GLOO}"), False),
        (RuntimeError("Connection reset by peer"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (ConfigError(GLOO), False),
    ],
    ids=range(10),
)
def test_a_lost_connection_is_told_from_an_error_of_the_ranks_own(error: Exception, is_lost: bool) -> None:
    def connect(timeout_sec: float) -> None:
        raise CommFailed("no connection in this test")

    peers = Peers(Channel((0, 1), 0, "a group", connect, HashStore()))  # type: ignore[arg-type]
    assert peers.is_lost_connection(error) is is_lost
