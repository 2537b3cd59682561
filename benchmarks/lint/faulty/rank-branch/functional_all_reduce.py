"""The functional variant is called without a group, so it needs all ranks."""

import torch.distributed as dist
import torch.distributed.nn


def f(x, rank):
    if rank < 4:
        torch.distributed.nn.all_reduce(x, dist.ReduceOp.SUM)  # expect: rank-branch
