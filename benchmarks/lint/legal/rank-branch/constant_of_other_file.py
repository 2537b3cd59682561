"""The rank is compared with a constant that another file's class sets."""

import roles
import torch.distributed as dist


def save(rank):
    if rank != roles.Role.ALONE:
        dist.barrier()
