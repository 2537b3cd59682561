"""All ranks enter the barrier in the `finally` block, even those that return."""

import torch.distributed as dist


def save(model, rank):
    try:
        if rank != 0:
            return
        write(model)
    finally:
        dist.barrier()
