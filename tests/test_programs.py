"""What fell when public programs ran under the guard (docs/others.md), each in a small program that shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WAITS_IN_CPP = """
import time, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
for step in range(2):
    if step == 1 and dist.get_rank() == 1:
        time.sleep(100)
    functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))
"""


def test_a_late_rank_says_so_where_another_one_waits_in_cpp(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(WAITS_IN_CPP)
    command = [sys.executable, "-m", "ddpstats", "run", "--nproc", "2", "--timeout-sec", "5", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    assert ended.returncode == 1
    assert "rank 1: did not take part" in ended.stderr  # rank 0 says so, and torchrun's last output
    assert "\nrank 1: RankMissing: rank 0: all_reduce(float32[3], sum)" in ended.stderr
