"""Rank 0 alone calls a helper that reduces in both of its branches, so it always does."""

import torch.distributed as dist


def total(x, twice):
    if twice:
        dist.all_reduce(x * 2)
    else:
        dist.all_reduce(x)


def log(x, rank):
    if rank == 0:
        total(x, True)  # expect: rank-branch
