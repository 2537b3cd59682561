"""What runs on the ranks of these tests."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

import ddpstats
from ddpstats._base import marks
from ddpstats.guard import collective_guard


def parted(directory: str) -> str:
    """The seed's loop over keys that ranks do not have alike, after one on which they agree."""
    rank = dist.get_rank()
    with collective_guard("record", record_dir=directory):
        for stats in ({"loss": torch.ones(1)}, {"l1_loss" if rank == 0 else "snr_loss": torch.ones(1)}):
            for key in stats:
                dist.all_reduce(stats[key])
        ddpstats.reduce_stats({"loss": float(rank), **({"only": 1.0} if rank else {})}, per_rank=True, name="train")
        marks.tell("sentinel", "rank 1: a gradient is far from normal", step=3, ranks=(1,))
    assert marks.listeners == []
    (Path(directory) / f"fr_trace_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    return str(Path(__file__).name)
