"""A rank that looks after rank 0 has built the file skips the barrier."""

from pathlib import Path

import torch.distributed as dist


def prepare(rank):
    cache = Path("cache.pt")
    if not cache.exists():
        if rank == 0:
            build(cache)
        dist.barrier()  # expect: data-branch
