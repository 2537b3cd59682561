"""What passes of the test scripts in accelerate's wheel passes with our patch, and under the guard, too.

Not run: `test_ddp_comm_hook` and `test_merge_weights`, which need GPUs; `test_notebook`, which starts processes of its
own; those of `external_deps`, which download models.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks import suites
from tests.needs import imported, needs

pytestmark = pytest.mark.library
needs("accelerate")
SCRIPTS = Path(imported("accelerate").__file__).parent / "test_utils" / "scripts"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@cache
def run(script: str, way: str, world_size: int) -> tuple[int, str]:
    ended = suites.run("accelerate", way, "accelerate_suite_runs", str(SCRIPTS / f"{script}.py"), ranks=world_size)
    return ended.returncode, ended.stderr[-6000:]


@pytest.mark.parametrize("way", suites.WITH_US)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("script", ["test_ops", "test_sync", "test_script"])
def test_accelerates_own_scripts_pass_as_they_pass_without(script: str, world_size: int, way: str) -> None:
    status, errors = run(script, "bare", world_size)
    if status != 0:
        pytest.skip(f"accelerate's {script} fails on {world_size} ranks without ddpstats, too: {errors[-200:]}")
    status, errors = run(script, way, world_size)
    assert status == 0, errors


@pytest.mark.parametrize("mode", ["strict", "step"])
def test_where_accelerates_own_script_hangs_without_gpus_the_guard_says_why(mode: str) -> None:
    # `join_uneven_inputs` has no effect there, and the script goes on: rank 0 trains, and rank 1 has no batch left
    status, errors = run("test_distributed_data_loop", mode, 2)
    assert status == 1
    assert "rank 0: broadcast(" in errors
    assert "rank 1: barrier()" in errors
    assert "in test_can_join_uneven_inputs" in errors
