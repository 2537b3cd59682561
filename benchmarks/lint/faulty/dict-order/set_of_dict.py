"""A set of the keys of a dict has another order in each process."""

import torch.distributed as dist


def reduce(losses):
    for name in set(losses):
        dist.all_reduce(losses[name])  # expect: dict-order
