"""The helper returns before its reduction where it is not enabled."""

import torch.distributed as dist


def mean(x, enabled):
    if not enabled:
        return
    dist.all_reduce(x)


def log(x, rank):
    if rank == 0:
        mean(x, False)
