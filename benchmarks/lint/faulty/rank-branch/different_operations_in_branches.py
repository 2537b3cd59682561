"""Rank 0 broadcasts while the other ranks reduce."""

import torch.distributed as dist


def both(x, rank):
    if rank == 0:
        dist.broadcast(x, 0)  # expect: rank-branch
    else:
        dist.all_reduce(x)
