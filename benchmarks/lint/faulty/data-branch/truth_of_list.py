"""A rank whose list of results is empty does not gather."""

import torch.distributed as dist


def step(results):
    if results:
        dist.all_gather_object([None] * 2, results)  # missed: data-branch
