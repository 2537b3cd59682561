"""Small programs that show what failed when public programs ran under the guard (docs/others.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs

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
WAITS_IN_A_SUBGROUP = """
import time, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
group = dist.new_group([0, 1])
functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))
if dist.get_rank() != 0:
    time.sleep(100)
functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group))
"""


@pytest.mark.parametrize(
    ("program", "late_ranks"), [(WAITS_IN_CPP, [1]), (WAITS_IN_A_SUBGROUP, [1, 2])], ids=["all ranks", "a subgroup"]
)
def test_late_ranks_say_so_where_another_one_waits_in_cpp(program: str, late_ranks: list[int], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    ranks = str(len(late_ranks) + 1)
    ended = programs.run(["-m", "ddpstats", "run", "--nproc", ranks, "--timeout-sec", "5", str(script)], timeout=200)
    assert ended.returncode == 1
    assert "rank 1: did not take part" in ended.stderr  # rank 0 says so, and torchrun's last output
    for rank in late_ranks:
        assert f"\nrank {rank}: RankMissing: rank 0: all_reduce(float32[3], sum)" in ended.stderr
