"""`ddpstats compare` finds the wrong weight of one rank in dumps of real ranks, between ranks and between two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpstats.cli import main
from ddpstats.testing import RankPool
from tests.dump import collect_runs as runs


@pytest.fixture(scope="module")
def dumps(three_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    three_ranks.run(runs.good_and_bad, str(path)).values()
    return path


def compare(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["compare", *map(str, words), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return status, document


def test_ranks_that_agree_have_status_0(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = compare(dumps / "good", capsys=capsys)
    (ranks,) = report["comparisons"]
    assert (status, ranks["unequal"], ranks["ranks"]) == (0, 0, [0, 1, 2])
    assert ranks["compared"]["statistics"] > 8, "parameters of all modules, and what all_reduce gave"


def test_rank_with_another_weight_is_named(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = compare(dumps / "bad", capsys=capsys)
    assert status == 1
    rows = report["comparisons"][0]["rows"]
    assert (rows[0]["names"]["rank 1"], rows[0]["path"]) == ("Module.1.linear.Linear.forward.0", "parameters.weight")
    assert all(row["culprits"] == ["rank 1"] for row in rows)


def test_runs_are_compared_rank_by_rank(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = compare(dumps / "good", dumps / "good", "--exact", capsys=capsys)
    assert (status, len(report["comparisons"])) == (0, 3)
    status, report = compare(dumps / "bad", dumps / "good", "--exact", capsys=capsys)
    first = [rank["rows"][0] for rank in report["comparisons"]]
    assert status == 1
    assert (first[1]["names"]["A"], first[1]["path"]) == ("Functional.linear.1.forward", "input.1")
    assert first[1]["parent"] == "Module.1.linear.Linear.forward.0"
    assert any("collecting.py" in line for line in first[1]["stack"])
    assert first[0]["names"]["A"] == "Distributed.all_reduce.0.forward", "it has reduced the other's gradient too"
    assert first[0]["path"] == "output.0"
