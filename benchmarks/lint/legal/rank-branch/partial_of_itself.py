"""A function of another file gets an argument, under its own name; rank 0 alone calls it."""

from functools import partial

import torch.distributed as dist


def save(collate, model, batches):
    collate = partial(collate, model=model)
    if dist.get_rank() == 0:
        collate(batches)
    dist.barrier()
