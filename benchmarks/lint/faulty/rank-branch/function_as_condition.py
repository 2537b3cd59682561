"""A function tells whether this is rank 0, which then reduces alone."""

import torch.distributed as dist


def first():
    return not dist.is_initialized() or dist.get_rank() == 0


def go(x):
    if first():
        dist.all_reduce(x)  # expect: rank-branch
