"""Keys are sorted, which does not help where ranks hold other ones: l1_loss comes before loss, and snr_loss after it.

Style: script: a loop over sorted keys
Mechanism: a loop over sorted keys that are not the same
"""

import torch
import torch.distributed as dist


def held(rank):
    return {"loss": torch.tensor(4.0), "snr_loss" if rank == 0 else "l1_loss": torch.tensor(9.0)}


def main():
    stats = held(dist.get_rank())
    for key in sorted(stats):
        dist.all_reduce(stats[key])  # label: key
        stats[key] /= dist.get_world_size()
    return held(dist.get_rank()), stats
