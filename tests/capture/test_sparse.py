"""Embeddings with sparse gradients: DDP reduces them in place, and a row may be there more than once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddpstats import cli
from ddpstats._observe.gradient_norms import measure, parts_of
from ddpstats.sentinel._gradient_digests import GradientDigests
from ddpstats.testing import RankPool
from tests.capture import sparse_runs as runs

REPLAY = ["--model", "tests.capture.sparse_runs:make_model", "--step", "tests.capture.sparse_runs:step"]


def sparse(indices: list[int], values: list[float]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([indices]), torch.tensor(values), (9,), check_invariants=True)


def test_a_norm_is_of_the_elements_and_not_of_their_parts() -> None:
    found = measure([sparse([1, 1, 2], [1.0, 2.0, 4.0]), sparse([1, 1], [3e38, 3e38]), sparse([], [])])
    assert found.tolist() == [5.0, float("inf"), 0.0]


def test_indices_count_in_a_witness() -> None:
    one, same, other = sparse([1, 2], [3.0, 4.0]), sparse([2, 1, 1], [4.0, 1.0, 2.0]), sparse([1, 3], [3.0, 4.0])
    witness = GradientDigests.of([one])
    assert witness.is_same(GradientDigests.of([same]), 0.0)
    assert not witness.is_same(GradientDigests.of([other]), 0.0)
    assert [*parts_of("w", one)] == ["w (indices)", "w (values)"]


@pytest.mark.parametrize("case", ["ddp", "ddp view", "ddp bag", "ddp dropout", "alone", "alone dense zeros"])
def test_a_correct_replay_fn_is_taken(two_ranks: RankPool, case: str) -> None:
    for culprits in two_ranks.run(runs.watched_by_a_sentinel, case).values():
        assert culprits == [(), (), ()]


@pytest.mark.parametrize("negative", [False, True])
def test_a_wrong_replay_fn_is_refused(two_ranks: RankPool, negative: bool) -> None:
    first, second = two_ranks.run(runs.refused, negative).values()
    assert first == second
    assert "replay_fn is not the step that was trained" in first


def test_a_wrong_sparse_gradient_is_found(three_ranks: RankPool) -> None:
    for culprits in three_ranks.run(runs.watched_by_a_sentinel, "ddp", True).values():
        assert culprits == [(), (), (1,)]


@pytest.mark.parametrize("case", ["ddp", "ddp view", "ddp bag", "alone"])
@pytest.mark.parametrize("bad_step", [0, 1])
def test_the_culprit_and_the_replay(
    two_ranks: RankPool, tmp_path: Path, case: str, bad_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two_ranks.run(runs.captured, case, bad_step, str(tmp_path)).values()
    assert first == second
    assert [verdict.kind for verdict in first] == ["nonfinite" if step == bad_step else "ok" for step in range(3)]
    verdict = first[bad_step]
    assert verdict.culprit_ranks == (1,)
    assert "table.weight" in verdict.parameters
    if "bag" in case:
        return
    for rank, status in (("1", 0), ("0", 1)):
        assert cli.main(["replay", str(verdict.bundle), *REPLAY, "--json", "--rank", rank, "--bisect"]) == status
        told = json.loads(capsys.readouterr().out)
        assert told["bit_for_bit"]["losses"] == told["bit_for_bit"]["norms"] == "equal"
        assert told["bit_for_bit"]["gradients"] == ("equal" if rank == "1" else "not compared: the capture has none")
        assert ("table.weight" in told["nonfinite_now"]) == (rank == "1")
        assert told["collectives"] == {}


def test_parts_that_are_finite_and_overflow(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.overflowing_parts, str(tmp_path)).values()
    assert first == second
    assert (first[0].kind, first[0].culprit_ranks) == ("nonfinite", (1,))


def test_the_cause_is_found(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.captured, "ddp", 1, str(tmp_path), True).values()
    assert first == second
    assert first[1].attribution is not None
    assert first[1].attribution.startswith("Cause: software or data")
