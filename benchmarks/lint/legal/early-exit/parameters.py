"""The parameters are equal on all ranks, so all of them return together."""

import torch
import torch.distributed as dist


def check(model):
    if any(torch.isnan(p).any() for p in model.parameters()):
        return
    dist.barrier()
