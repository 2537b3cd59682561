"""A tensor of zeros is filled from the batch of this rank; where it is NaN the rank returns."""

import torch
import torch.distributed as dist


def f(model, batch):
    losses = torch.zeros(3)
    losses[0] = model(batch)
    if torch.isnan(losses.sum()):
        return  # expect: early-exit
    dist.barrier()
