"""Each rank reduces once for each of its own files, and the counts may differ by one."""

import torch.distributed as dist


def evaluate(files, rank, world_size):
    for file in files[rank::world_size]:
        dist.all_reduce(score(file))  # expect: rank-branch
