"""A rank whose batch is empty does not reduce."""

import torch.distributed as dist


def log(batch, total):
    if len(batch) > 0:
        dist.all_reduce(total)  # expect: data-branch
