"""What passes of the test scripts in accelerate's wheel passes with our patch, and under the guard, too.

Not run: `test_ddp_comm_hook` and `test_merge_weights`, which need GPUs; `test_notebook`, which starts processes of its
own; those of `external_deps`, which download models. `test_script` splits two rows among the ranks, and so has two.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks import suites
from tests.needs import imported, needs
from tests.programs import Ended

pytestmark = pytest.mark.library
needs("accelerate")
SCRIPTS = Path(imported("accelerate").__file__).parent / "test_utils" / "scripts"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@cache
def run(script: str, way: str, world_size: int) -> Ended:
    path = str(SCRIPTS / f"{script}.py")
    return suites.on_ranks("accelerate", way, "accelerate_suite_runs", path, ranks=world_size)


@pytest.mark.parametrize("way", suites.WITH_US)
@pytest.mark.parametrize(
    ("script", "world_size"), [("test_ops", 2), ("test_ops", 3), ("test_sync", 2), ("test_sync", 3), ("test_script", 2)]
)
def test_accelerates_own_scripts_pass_as_they_pass_without(script: str, world_size: int, way: str) -> None:
    without = run(script, "bare", world_size)
    if any(without.statuses):
        pytest.skip(f"accelerate's {script} fails on {world_size} ranks without ddpstats, too: {without.stderr[-200:]}")
    ended = run(script, way, world_size)
    assert not any(ended.statuses), ended.stderr[-6000:]


@pytest.mark.parametrize("mode", ["strict", "step"])
def test_where_accelerates_own_script_hangs_without_gpus_the_guard_says_why(mode: str) -> None:
    # `join_uneven_inputs` has no effect there, and the script goes on: rank 0 trains, and rank 1 has no batch left
    ended = run("test_distributed_data_loop", mode, 2)
    assert ended.statuses == [1, 1]
    assert "rank 0: broadcast(" in ended.stderr
    assert "rank 1: barrier()" in ended.stderr
    assert "in test_can_join_uneven_inputs" in ended.stderr
