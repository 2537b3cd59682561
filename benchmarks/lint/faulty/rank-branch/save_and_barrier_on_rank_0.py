"""Rank 0 alone saves and enters a barrier. The other ranks never do, so rank 0 hangs."""

import torch
import torch.distributed as dist


def save(model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
        dist.barrier()  # expect: rank-branch
