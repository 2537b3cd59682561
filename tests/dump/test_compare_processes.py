"""``ddpstats compare`` on dumps of real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpstats.cli import main
from ddpstats.testing import run_ranks
from tests.dump import compare_runs as runs


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    run_ranks(runs.good_and_bad, 3, str(path), timeout_sec=120).values()
    return path


def compare(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["compare", *map(str, words), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return status, found


def test_ranks_that_agree(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = compare(dumps / "good", capsys=capsys)
    assert (status, found["different"], found["ranks"]) == (0, 0, [0, 1, 2])
    assert found["compared"] > 8, "parameters of all modules, and what all_reduce gave"


def test_the_rank_with_another_weight_is_named(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = compare(dumps / "bad", capsys=capsys)
    assert status == 1
    assert found["first"]["name"] == "Module.1.linear.Linear.forward.0.parameters.weight"
    assert all(one["culprit_ranks"] == [1] for one in found["divergences"])


def test_runs_are_compared_rank_by_rank(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = compare(dumps / "good", dumps / "good", "--exact", capsys=capsys)
    assert (status, len(found["ranks"])) == (0, 3)
    status, found = compare(dumps / "bad", dumps / "good", "--exact", capsys=capsys)
    first = [rank["first_unequal"] for rank in found["ranks"]]
    assert status == 1
    assert first[1]["name"] == "Functional.linear.1.forward.input.1"
    assert first[1]["parent"] == "Module.1.linear.Linear.forward.0"
    assert any("collecting.py" in line for line in first[1]["stack"])
    assert first[0]["name"] == "Distributed.all_reduce.0.forward.output.0", "it has reduced the other's gradient too"
