"""Stats are reduced as espnet does it: gathered and added up; rank 1 has l1_loss where rank 0 has snr_loss.

Style: espnet: a recursive sum by all_gather
Mechanism: a recursive function that gathers and adds up
"""

import torch
import torch.distributed as dist


def walk(obj, weight):
    if isinstance(obj, dict):
        return {k: walk(v, weight) for k, v in obj.items()}
    obj = (obj * weight.to(obj.dtype)).sum()
    lst = [torch.empty_like(obj) for _ in range(dist.get_world_size())]
    dist.all_gather(lst, obj)
    obj = sum(lst)
    return obj / dist.get_world_size()


def held(rank):
    stats = {"loss": torch.tensor(4.0)}
    stats["snr_loss" if rank == 0 else "l1_loss"] = torch.tensor(-18.0 if rank == 0 else 2.0)
    return stats


def main():
    rank = dist.get_rank()
    return held(rank), walk(held(rank), torch.ones(()))
