"""The loss is reduced by a helper, so all ranks leave the loop together."""

import torch
import torch.distributed as dist


def all_mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()


def loop(loader):
    for batch in loader:
        loss = all_mean(step(batch))
        if loss > 10:
            break
