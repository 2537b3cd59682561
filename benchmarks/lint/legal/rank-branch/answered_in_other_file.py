"""The other ranks run a function of another file that takes part in the broadcast."""

import torch.distributed as dist

from . import follow
from .worker import receive_from_master


def share(x, rank):
    if rank == 0:
        dist.broadcast(x, 0)
    else:
        x = receive_from_master()
    return x


def main(rank, prompts, model):
    if rank != 0:
        follow.worker_loop(model)
        return
    for prompt in prompts:
        dist.broadcast_object_list([prompt], 0)
