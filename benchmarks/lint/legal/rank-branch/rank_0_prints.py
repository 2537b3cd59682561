"""All ranks reduce, and rank 0 prints."""

import torch.distributed as dist


def log(loss, rank):
    dist.all_reduce(loss)
    if rank == 0:
        print(loss.item())
