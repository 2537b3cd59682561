"""Rank 0 prints the result of a helper in the same file that reduces."""

import torch.distributed as dist


def mean(x):
    if not dist.is_initialized():
        return x
    dist.all_reduce(x)
    return x / dist.get_world_size()


def report(loss):
    if dist.get_rank() == 0:
        print(mean(loss))  # expect: rank-branch
