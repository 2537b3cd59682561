"""A flag starts as False and becomes True on rank 0 alone, which then reduces alone."""

import torch.distributed as dist


def step(loss):
    chosen = False
    if dist.get_rank() == 0:
        chosen = True
    if chosen:
        dist.all_reduce(loss)  # expect: rank-branch
