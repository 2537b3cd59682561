"""Rank 0 sends to rank 1."""

import torch.distributed as dist


def pass_on(x, rank):
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
