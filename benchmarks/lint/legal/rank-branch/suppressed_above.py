"""A comment on the line above suppresses the finding."""

import torch.distributed as dist


def save(rank):
    if rank == 0:
        # the others wait in serve()   ddpstats: this is prose
        # ddpstats: ignore[rank-branch]
        dist.barrier()
