"""The rank is that of a matrix decomposition, with a default in the constructor."""

import torch.distributed as dist


class State:
    def __init__(self, rank: int = 4):
        self.rank = rank


def hook(state, bucket):
    if state.rank > 0:
        dist.all_reduce(bucket)
