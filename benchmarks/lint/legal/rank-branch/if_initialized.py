"""The reduction is skipped where there is no process group, which is so on all ranks."""

import torch.distributed as dist


def mean(x):
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x)
        x = x / dist.get_world_size()
    return x
