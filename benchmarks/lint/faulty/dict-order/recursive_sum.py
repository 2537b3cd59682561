"""A nested dict is reduced by recursion, in the order of each level."""

import torch
import torch.distributed as dist


def recursive_sum(obj, distributed=False):
    if isinstance(obj, dict):
        return {k: recursive_sum(v, distributed) for k, v in obj.items()}  # expect: dict-order
    if distributed:
        dist.all_reduce(obj)
    return obj
