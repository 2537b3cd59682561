"""Findings in installed libraries that docs/lint.md calls proven hang or compute a wrong number on two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ddpstats.lint.lint import lint
from ddpstats.testing import RankPool
from tests.lint import proof_runs
from tests.needs import needs

pytestmark = pytest.mark.library


def rules_found(module: str) -> list[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return rules_in(Path(spec.origin))


def rules_in(file: Path) -> list[str]:
    return [finding.rule for finding in lint([file]).findings]


def test_espnet_adds_one_key_to_another(two_ranks: RankPool) -> None:
    needs("espnet2")
    assert rules_found("espnet2.torch_utils.recursive_op") == ["dict-order"]
    right = {"loss": 1.0, "acc": 100.0}
    assert all(average != right for average in two_ranks.run(proof_runs.espnet_average).values())


def test_funasr_adds_one_key_to_another(two_ranks: RankPool) -> None:
    needs("funasr")
    spec = importlib.util.find_spec("funasr")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "train_utils" / "recursive_op.py"
    assert rules_in(file) == ["dict-order"]
    right = {"loss": 1.0, "acc": 100.0}
    assert all(average != right for average in two_ranks.run(proof_runs.funasr_average, str(file)).values())


def test_transformers_concatenates_labels_to_logits(two_ranks: RankPool) -> None:
    needs("transformers")
    assert "dict-order" in rules_found("transformers.trainer_pt_utils")
    first, _ = two_ranks.run(proof_runs.transformers_concat).values()
    assert first == {"logits": [1.0, 100.0], "labels": [100.0, 1.0]}


def test_accelerate_loads_on_rank_0_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    needs("accelerate")
    assert rules_found("accelerate.utils.fsdp_utils") == ["early-exit"]
    for message in two_ranks.run(proof_runs.accelerate_load, str(tmp_path)).values():
        assert "rank 0: all_gather" in message, message
        assert "rank 1: all_reduce" in message, message
