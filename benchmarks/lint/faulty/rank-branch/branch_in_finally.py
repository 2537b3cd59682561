"""Rank 0 alone enters a barrier in a `finally` block."""

import torch.distributed as dist


def save(x, rank):
    try:
        print(x)
    finally:
        if rank == 0:
            dist.barrier()  # expect: rank-branch
