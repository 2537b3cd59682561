"""The group of the reduction is given by position."""

import torch.distributed as dist


def sync(x, rank, evens):
    if rank % 2 == 0:
        dist.all_reduce(x, dist.ReduceOp.SUM, evens)
