"""What passes of torch's own tests of `torch.distributed` passes under the guard, too, in both modes that compare."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

LIMIT_SEC = 3600.0
LEAST_TESTS = 80


@cache
def outcomes(mode: str, world_size: int, *names: str) -> dict[str, str]:
    command = [sys.executable, "-m", "benchmarks.torch_suite_runs", mode, str(world_size), *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_SEC, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_own_tests_pass_under_the_guard_as_they_pass_without(mode: str, world_size: int) -> None:
    passing = [name for name, outcome in outcomes("bare", world_size).items() if outcome == "passed"]
    assert len(passing) >= LEAST_TESTS
    under_guard = outcomes(mode, world_size, *passing)
    assert under_guard == dict.fromkeys(passing, "passed")
