"""The loss is a parameter of the function, and a rank reduces only where it is above a limit."""

import torch.distributed as dist


def step(loss):
    if loss > 10:
        dist.all_reduce(loss)  # missed: data-branch
