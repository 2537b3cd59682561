"""Each entry is reduced in a group of its own."""

import torch.distributed as dist


def norm_of(tensors, group):
    total = sum(tensors)
    dist.all_reduce(total, group=group)
    return total


def norms(expert_tensors, groups):
    return [norm_of(tensors, groups[name]) for name, tensors in expert_tensors.items()]
