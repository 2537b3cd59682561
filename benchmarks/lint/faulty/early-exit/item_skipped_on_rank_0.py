"""Rank 0 skips empty items, for which the others wait in the broadcast."""

import torch.distributed as dist


def talk(items):
    for item in items:
        if dist.get_rank() == 0:
            if not item:
                continue  # expect: early-exit
        dist.broadcast_object_list([item], src=0)
