"""The helper reduces its argument in place, and the caller then reads it as its own loss."""

import torch.distributed as dist


def reduce_mean(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def train(loss, total):
    mean = reduce_mean(loss)  # expect: aliased-reduce
    total += loss.item()
