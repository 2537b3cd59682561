"""Each rank leaves the loop by its own clock."""

import time

import torch.distributed as dist


def train(loader, limit):
    start = time.time()
    for batch in loader:
        dist.all_reduce(step(batch))
        elapsed = time.time() - start
        if elapsed > limit:
            break  # expect: early-exit
