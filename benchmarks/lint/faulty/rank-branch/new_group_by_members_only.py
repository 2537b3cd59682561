"""Only the members of the new group call `new_group`, which needs all ranks."""

import torch.distributed as dist


def make(rank):
    if rank < 2:
        return dist.new_group([0, 1])  # expect: rank-branch
