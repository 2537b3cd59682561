"""A `match` on the rank reduces in the case of rank 0 alone."""

import torch.distributed as dist


def go(x):
    match dist.get_rank():
        case 0:
            dist.all_reduce(x)  # missed: rank-branch
