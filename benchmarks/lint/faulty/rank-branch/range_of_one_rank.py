"""Each rank gathers once for each of its own indices, and the counts may differ by one."""

import torch.distributed as dist


def evaluate(n):
    for i in range(dist.get_rank(), n, dist.get_world_size()):
        dist.all_gather_object([None] * 2, i)  # expect: rank-branch
