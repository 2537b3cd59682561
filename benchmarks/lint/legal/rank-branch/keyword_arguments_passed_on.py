"""The group may be among the keyword arguments that are passed on."""

import torch.distributed as dist


def reduce(x, rank, **kwargs):
    if rank < 4:
        dist.all_reduce(x, **kwargs)
