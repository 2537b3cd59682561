"""Rank 0 writes the file after a collective, which no rank enters before it has looked."""

import os

import torch.distributed as dist


def prepare(path, rank, x):
    if os.path.exists(path):
        return load(path)
    dist.all_reduce(x)
    if rank == 0:
        save(x, path)
    dist.barrier()
    return x
