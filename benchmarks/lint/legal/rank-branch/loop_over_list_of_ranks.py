"""All ranks loop over a list of ranks."""

import torch.distributed as dist


def walk(ranks, tensors):
    for rank in ranks:
        if rank != 0:
            dist.broadcast(tensors[rank], src=rank)
    for rank, tensor in enumerate(tensors):
        if rank > 0:
            dist.broadcast(tensor, src=rank)
