"""Each rank reduces as often as its own loss asks for."""

import torch
import torch.distributed as dist


def fit(loss, grad):
    while loss > 1e-3:
        loss = step()
        dist.all_reduce(grad)  # expect: data-branch
