"""A rank that raises in its micro-batch may go on; ranks that miss it say what it raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from ddpstats import RankMissing
from ddpstats.capture.bundle import Bundle
from ddpstats.capture.capture import is_lost_connection
from ddpstats.errors import ConfigError
from ddpstats.testing import RankPool, run_ranks
from tests.capture import peers_runs as runs

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"


def test_each_rank_that_raises_writes_its_own_bundle(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(runs.writes_alone, str(tmp_path)).values() == [None, None]
    bundles = sorted(tmp_path.iterdir(), key=lambda path: path.name[-10:])
    assert [path.name[-10:] for path in bundles] == ["-rank00000", "-rank00001"]
    for rank, path in enumerate(bundles):
        manifest = json.loads((path / "MANIFEST.json").read_text())
        assert (manifest["reason"], manifest["ranks_present"], manifest["ranks"]) == ("exception", [rank], [0, 1])
        assert manifest["missing"] == {str(1 - rank): f"this bundle is rank {rank}'s alone: it raised"}
        assert Bundle.open(path).parameters(rank)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: This usually reflects invalid usage"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (ConfigError(GLOO), False),
    ],
    ids=range(5),
)
def test_a_lost_connection_is_distinguished_from_an_error_of_the_rank_itself(error: Exception, is_lost: bool) -> None:
    assert is_lost_connection(error) is is_lost


@pytest.mark.parametrize(
    ("skipping", "is_judged", "wrap"),
    [((0, 1), False, True), ((0, 1), True, False), ((1,), True, False)],
    ids=["all leave out the step", "all judge it", "one rank, which judges it"],
)
def test_a_batch_whose_exception_is_caught_leaves_the_capture_usable(
    two_ranks: RankPool, tmp_path: Path, skipping: tuple[int, ...], is_judged: bool, wrap: bool
) -> None:
    first, second = two_ranks.run(runs.goes_on, str(tmp_path), skipping, is_judged, wrap).values()
    assert first == second
    assert [verdict.kind for verdict in first] == ["ok"] * (1 + is_judged) + ["nonfinite"]
    assert first[-1].culprit_ranks == (1,)
    assert Bundle.open(first[-1].bundle).manifest.complete


def test_a_rank_that_left_out_a_check_is_missed_at_the_last_one(tmp_path: Path) -> None:
    env = {"DDPSTATS_TIMEOUT_SEC": "4"}
    first, second = run_ranks(runs.goes_on, 2, str(tmp_path), (1,), False, False, env=env, timeout_sec=60)
    assert isinstance(first.error, RankMissing)
    assert first.error.missing_ranks == (1,)
    assert [verdict.kind for verdict in second.value] == ["ok", "nonfinite"]
