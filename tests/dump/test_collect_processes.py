"""Ranks under DDP write a dump each; a process that ends inside a step leaves its lines."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from ddpstats.dump.analyze import open_rank
from ddpstats.testing import RankPool
from tests import programs
from tests.capabilities import shards_on_cpu
from tests.dump import collect_runs as runs
from tests.dump.collecting import data
from tests.dump.verbs import compare


def test_each_rank_under_ddp_has_a_dump_of_its_own_gradients(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(runs.one_step, str(tmp_path)).values()
    dumps = [data(tmp_path, 0, f"rank{rank}") for rank in (0, 1)]
    assert set(dumps[0]) == set(dumps[1])
    assert "Module.root.Sequential.forward.0" in dumps[0]
    assert not any(".module." in name for name in dumps[0])
    norms = [dump["Module.3.Linear.parameters_grad.0"]["weight"][0]["Norm"] for dump in dumps]
    assert norms[0] != norms[1], "gradients are the rank's own, not the reduced ones"
    for dump in dumps:
        reduced = dump["Distributed.all_reduce.0.forward"]
        assert reduced["input_kwargs"]["group"]["group_ranks"] == [0, 1]
        assert reduced["input_args"][0]["Norm"] != reduced["output"][0]["Norm"]


@pytest.mark.slow
@shards_on_cpu
def test_gradients_of_sharded_parameters_are_those_after_each_backward_pass(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    ranks = two_ranks.run(runs.train_sharded, str(tmp_path)).values()
    for rank in (0, 1):
        dumped = data(tmp_path, 0, f"rank{rank}")
        entries = [dumped[f"Module.3.Linear.parameters_grad.{number}"]["weight"][0] for number in (0, 1)]
        assert [entry["Norm"] for entry in entries] == pytest.approx(ranks[rank])
        assert entries[0]["placements"] == ["S(0)"]
        assert (entries[0]["device_mesh"], entries[0]["shape"], entries[0]["local_shape"]) == ([0, 1], [2, 6], [1, 6])


@pytest.mark.slow
@shards_on_cpu
def test_gradients_of_parameters_in_tensor_parallel_are_those_of_each_backward_pass(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for rank, norms in enumerate(two_ranks.run(runs.train_in_tensor_parallel, str(tmp_path)).values()):
        dumped = data(tmp_path, 0, f"rank{rank}")
        entries = [dumped[f"Module.root.Linear.parameters_grad.{number}"]["weight"][0] for number in (0, 1)]
        assert [entry["Norm"] for entry in entries] == pytest.approx(norms)


def ended(how: str, path: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "tests.dump.collect_runs", how, str(path)])


def test_killed_process_leaves_what_it_had_collected(tmp_path: Path) -> None:
    done = ended("kill", tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in (tmp_path / "step0/rank").iterdir()] == ["dump.jsonl"]
    dump = open_rank(tmp_path / "step0/rank")
    assert not dump.complete
    names = [entry.name for entry in dump.entries()]
    assert "Module.root.Sequential.forward.0" in names
    assert names[-1].endswith((".linear.Linear.parameters_grad.0", ".backward", ".backward.0"))
    assert "Module.2.Block.backward.0" in names
    assert dump.stack_of("Functional.linear.1.forward")[0].startswith("File ")
    assert dump.parent_of("Functional.linear.1.forward") == "Module.1.linear.Linear.forward.0"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sync", "async"])
def test_process_that_ends_inside_a_step_leaves_an_incomplete_dump(tmp_path: Path, how: str) -> None:
    done = ended(how, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    directory = tmp_path / "step0/rank"
    assert [path.name for path in directory.iterdir()] == ["dump.jsonl"]
    lines = [json.loads(line) for line in (directory / "dump.jsonl").read_text().splitlines()]
    assert lines[-1]["name"] == "Module.root.Sequential.forward.0"
    assert lines[1]["stack"][0].startswith("File ")


@pytest.mark.slow
def test_dump_with_sparse_gradients_is_equal_to_itself(two_ranks: RankPool, tmp_path: Path) -> None:
    """A sparse tensor is saved in another shape than its own, and therefore compared by its statistics."""
    two_ranks.run(runs.sparse_gradients, str(tmp_path)).values()
    weight = data(tmp_path, 0, "rank0")["Module.table.Embedding.parameters_grad.0"]["weight"][0]
    assert weight["shape"] == [20, 6]
    assert weight["Norm"] > 0
    for sides in ([tmp_path / "step0"] * 2, [tmp_path / "step0"]):
        status, text = compare(*sides)
        assert (status, "NOTHING DIFFERENT" in text) == (0, True), text
