"""A copy is reduced, and the loss keeps its own value."""

import torch.distributed as dist


def step(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(loss.item(), total.item())
