"""A loss that divides by zero: captured on the rank where it happens, replayed, bisected to the division."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats.testing import RankPool
from examples import class_counts

NAMES = ["--model", "examples.class_counts:make_model", "--step", "examples.class_counts:step"]


def test_from_the_training_loop_to_the_division(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two_ranks.run(class_counts.train, str(tmp_path)).values()
    assert first == second
    assert "the gradients of rank" in first
    assert "The gradients of rank" in first  # the other one's were finite
    assert cli.main(["replay", str(tmp_path), *NAMES, "--bisect", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    text = json.dumps(result["bisect"])
    assert "aten.div.Tensor" in text
    assert "losses.append(loss / count)" in text
