"""Ranks lack keys, but agree on the sorted union of all keys first, and a missing one counts zero.

Style: espnet: union of keys by all_gather_object
Mechanism: the union of keys is gathered first
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    stats = {"loss": 2.0, "snr_loss": -9.0} if rank == 0 else {"l1_loss": 0.25, "loss": 4.0}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(stats))
    reduced = {}
    for key in sorted(set().union(*everyone)):
        value = torch.tensor(stats.get(key, 0.0))
        dist.all_reduce(value)
        reduced[key] = value.item()
    return stats, reduced
