"""Both branches reduce twice, but rank 0 enters one more barrier."""

import torch.distributed as dist


def both(x, y, rank):
    if rank == 0:
        dist.all_reduce(x)
        dist.all_reduce(y)
        dist.barrier()  # expect: rank-branch
    else:
        dist.all_reduce(x)
        dist.all_reduce(y)
