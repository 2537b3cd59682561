"""Rank 0 alone runs the barrier, under a condition that also sets the rank."""

import torch.distributed as dist


def finish():
    if (rank := dist.get_rank()) == 0:
        print("rank", rank)
        dist.barrier()  # expect: rank-branch
