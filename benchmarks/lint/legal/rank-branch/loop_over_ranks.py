"""All ranks loop over all ranks."""

import torch.distributed as dist


def share(tensors, world_size):
    for rank in range(world_size):
        if rank == 0:
            print("first")
        dist.broadcast(tensors[rank], src=rank)
    for rank in range(world_size):
        if rank > 0:
            dist.barrier()
