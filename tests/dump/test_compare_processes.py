"""`ddpstats compare` finds the wrong weight of one rank in dumps of real ranks, between ranks and between two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats.testing import RankPool
from tests.dump import collect_runs as runs
from tests.dump.verbs import compare_json


@pytest.fixture(scope="module")
def dumps(three_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    three_ranks.run(runs.good_and_bad, str(path)).values()
    return path


def test_ranks_that_agree_have_status_0(dumps: Path) -> None:
    status, report = compare_json(dumps / "good")
    (ranks,) = report["comparisons"]
    assert (status, ranks["unequal"], ranks["ranks"]) == (0, 0, [0, 1, 2])
    assert ranks["compared"]["statistics"] > 8, "parameters of all modules, and what all_reduce gave"


def test_rank_with_another_weight_is_named(dumps: Path) -> None:
    status, report = compare_json(dumps / "bad")
    assert status == 1
    rows = report["comparisons"][0]["rows"]
    assert (rows[0]["names"]["rank 1"], rows[0]["path"]) == ("Module.1.linear.Linear.forward.0", "parameters.weight")
    assert all(row["culprits"] == ["rank 1"] for row in rows)


def test_runs_are_compared_rank_by_rank(dumps: Path) -> None:
    status, report = compare_json(dumps / "good", dumps / "good", "--exact")
    assert (status, len(report["comparisons"])) == (0, 3)
    status, report = compare_json(dumps / "bad", dumps / "good", "--exact")
    first = [rank["rows"][0] for rank in report["comparisons"]]
    assert status == 1
    assert (first[1]["names"]["A"], first[1]["path"]) == ("Functional.linear.1.forward", "input.1")
    assert first[1]["parent"] == "Module.1.linear.Linear.forward.0"
    assert any("collecting.py" in line for line in first[1]["stack"])
    assert first[0]["names"]["A"] == "Distributed.all_reduce.0.forward", "it has reduced the other's gradient too"
    assert first[0]["path"] == "output.0"
