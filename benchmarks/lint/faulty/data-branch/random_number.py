"""Each rank draws a random number of its own, and reduces in one case of ten."""

import random

import torch.distributed as dist


def step(x):
    if random.random() < 0.1:
        dist.all_reduce(x)  # missed: data-branch
