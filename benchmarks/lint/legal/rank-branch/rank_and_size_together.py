"""Rank and world size are assigned together, and the condition is about the size."""

import torch.distributed as dist


def gather(x, mpu):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        dist.all_reduce(x)
    rank, size = info() if mpu is None else (mpu.get_rank(), mpu.get_size())
    if size > 1:
        dist.all_reduce(x)
