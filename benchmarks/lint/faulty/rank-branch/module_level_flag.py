"""A flag of the module, computed from the environment, is true on rank 0 alone."""

import os

import torch.distributed as dist

MAIN = int(os.environ.get("RANK", "0")) == 0


def go(x):
    if MAIN:
        dist.all_reduce(x)  # expect: rank-branch
