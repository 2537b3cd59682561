"""The rank is the number of dimensions of a tensor."""

import torch.distributed as dist


def reduce(x):
    rank = x.dim()
    if rank == 3:
        dist.all_reduce(x)
    rank = len(x.shape)
    if rank == 3:
        dist.all_reduce(x)
