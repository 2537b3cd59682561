"""The rank is a size of a tensor, so it is no process's rank."""

import torch
import torch.distributed as dist


def factors(n, rank):
    left = torch.randn(n, rank)
    if rank > 8:
        dist.all_reduce(left)
