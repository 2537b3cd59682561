"""The group of the reduction is passed through a helper."""

import torch.distributed as dist


def mean(x=None, /, group=None, *, scale=1):
    dist.all_reduce(x, group=group)
    return x


def sync(x, rank, evens):
    if rank % 2 == 0:
        mean(x, group=evens)
