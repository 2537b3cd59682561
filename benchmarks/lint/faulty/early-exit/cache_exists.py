"""A rank that sees the file of rank 0 returns before the barrier."""

import os

import torch.distributed as dist


def prepare(path, rank):
    if os.path.isfile(path):
        return load(path)  # expect: early-exit
    if rank == 0:
        build(path)
    dist.barrier()
    return load(path)
