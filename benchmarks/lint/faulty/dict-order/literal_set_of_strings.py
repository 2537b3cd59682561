"""A literal set of strings has another order in each process."""

import torch.distributed as dist


def f(table):
    for key in {"loss", "acc"}:
        dist.all_reduce(table[key])  # expect: dict-order
