"""The reduction is one side of a conditional expression whose condition is the rank."""

import torch.distributed as dist


def total(x):
    return dist.all_reduce(x) if dist.get_rank() == 0 else x  # expect: rank-branch
