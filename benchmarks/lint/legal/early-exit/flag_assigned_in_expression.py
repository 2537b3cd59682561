"""The name of this rank's own flag is given, by `:=`, to what all ranks have agreed on."""

import torch
import torch.distributed as dist


def update(loss, optimizer):
    skip = torch.isnan(loss)
    votes = skip.float()
    dist.all_reduce(votes)
    if skip := votes.item() > 0:
        print("a rank has NaN")
    if skip:
        return
    dist.barrier()
    optimizer.step()
