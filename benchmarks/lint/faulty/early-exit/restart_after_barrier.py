"""Rank 0 starts the round again after the barrier, and then enters it twice."""

import torch.distributed as dist


def talk(said):
    while True:
        dist.barrier()
        if dist.get_rank() == 0:
            if not said():
                continue  # expect: early-exit
        dist.broadcast_object_list([None], src=0)
