"""The keys are sorted."""

import torch.distributed as dist


def log(stats):
    for key in sorted(stats):
        dist.all_reduce(stats[key])
    for key, value in sorted(stats.items()):
        dist.all_reduce(value)
