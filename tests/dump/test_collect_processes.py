"""The collector under DDP, and in processes that end inside a step."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddpstats.cli import main
from ddpstats.dump.format._files import open_rank
from ddpstats.testing import run_ranks
from tests import programs
from tests.capabilities import shards_on_cpu
from tests.dump import collect_runs as runs
from tests.dump.collecting import data

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    path = tmp_path_factory.mktemp("ranks")
    return path, run_ranks(runs.train_all, 2, str(path), timeout_sec=120).values()


Trained = tuple[Path, list[dict[str, dict[str, Any]]]]
KINDS = pytest.mark.parametrize("kind", [f"{level} {flag}" for level in ("L0", "L1", "mix") for flag in (False, True)])


@KINDS
def test_ranks_train_to_the_same_bits_and_no_hook_stays(trained: Trained, kind: str) -> None:
    for rank in trained[1]:
        assert rank[kind] == rank["plain"]
    assert trained[1][0]["plain"]["parameters"] == trained[1][1]["plain"]["parameters"]


@KINDS
def test_each_rank_has_a_dump_of_its_own(trained: Trained, kind: str) -> None:
    path = trained[0] / kind
    assert sorted(one.name for one in path.iterdir()) == ["step1"]
    ranks = [data(path, 1, f"rank{rank}") for rank in (0, 1)]
    assert set(ranks[0]) == set(ranks[1])
    if not kind.startswith("L1"):
        assert "Module.root.Sequential.forward.0" in ranks[0]
        assert not any(".module." in name for name in ranks[0])


def test_gradients_of_parameters_are_the_rank_s_own(trained: Trained) -> None:
    norms = [
        data(trained[0] / "L0 False", 1, f"rank{rank}")["Module.3.Linear.parameters_grad.0"]["weight"][0]["Norm"]
        for rank in (0, 1)
    ]
    assert norms[0] != norms[1]


@shards_on_cpu
def test_gradients_of_sharded_parameters_are_those_at_the_end(tmp_path: Path) -> None:
    ranks = run_ranks(runs.train_sharded, 2, str(tmp_path), timeout_sec=120).values()
    for rank in (0, 1):
        found = data(tmp_path, 0, f"rank{rank}")
        entries = [found[f"Module.3.Linear.parameters_grad.{number}"]["weight"][0] for number in (0, 1)]
        assert [entry["Norm"] for entry in entries] == pytest.approx(ranks[rank])
        assert entries[0]["placements"] == ["S(0)"]
        assert (entries[0]["device_mesh"], entries[0]["shape"], entries[0]["local_shape"]) == ([0, 1], [2, 6], [1, 6])


@pytest.mark.parametrize("kind", ["L1 False", "mix True"])
def test_collectives_are_among_the_entries(trained: Trained, kind: str) -> None:
    for rank in (0, 1):
        found = data(trained[0] / kind, 1, f"rank{rank}")
        names = [name for name in found if name.startswith("Distributed.all_reduce")]
        assert names
        entry = found[names[0]]
        assert entry["input_kwargs"]["group"]["group_ranks"] == [0, 1]
        assert entry["input_args"][0]["Norm"] is not None
        assert entry["output"][0]["Norm"] is not None


def ended(how: str, path: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "tests.dump.collect_runs", how, str(path)], timeout=100)


def test_a_killed_process_leaves_what_it_had_collected(tmp_path: Path) -> None:
    done = ended("kill", tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [one.name for one in (tmp_path / "step0/rank").iterdir()] == ["dump.jsonl"]
    dump = open_rank(tmp_path / "step0/rank")
    assert not dump.complete
    names = [entry.name for entry in dump.entries()]
    assert "Module.root.Sequential.forward.0" in names
    assert names[-1].endswith((".linear.Linear.parameters_grad.0", ".backward", ".backward.0"))
    assert "Module.2.Block.backward.0" in names
    assert dump.stack_of("Functional.linear.1.forward")[0].startswith("File ")
    assert dump.parent_of("Functional.linear.1.forward") == "Module.1.linear.Linear.forward.0"


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_process_that_ends_inside_a_step_leaves_an_incomplete_dump(tmp_path: Path, how: str) -> None:
    done = ended(how, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    directory = tmp_path / "step0/rank"
    assert [one.name for one in directory.iterdir()] == ["dump.jsonl"]
    lines = [json.loads(line) for line in (directory / "dump.jsonl").read_text().splitlines()]
    assert lines[-1]["name"] == "Module.root.Sequential.forward.0"
    assert lines[1]["stack"][0].startswith("File ")


def test_a_dump_with_sparse_gradients_is_equal_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a sparse tensor stores has another shape than the tensor: it is compared by its statistics."""
    run_ranks(runs.sparse_gradients, 2, str(tmp_path), timeout_sec=120).values()
    weight = data(tmp_path, 0, "rank0")["Module.table.Embedding.parameters_grad.0"]["weight"][0]
    assert weight["shape"] == [20, 6]
    assert weight["Norm"] > 0
    assert main(["compare", str(tmp_path / "step0"), str(tmp_path / "step0")]) == 0, capsys.readouterr()
    assert "NOTHING DIFFERENT" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "step0")]) == 0, capsys.readouterr()
