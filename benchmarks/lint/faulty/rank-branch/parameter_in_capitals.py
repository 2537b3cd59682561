"""The rank is compared with a parameter that is written in capitals, which is no constant."""

import torch.distributed as dist


def gather_some(x, rank, N):
    if rank < N:
        dist.all_reduce(x)  # expect: rank-branch
