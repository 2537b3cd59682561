"""Rank 0 alone collects the state of a sharded model, which gathers."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def save(net, rank):
    model = FSDP(net)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")  # missed: rank-branch
