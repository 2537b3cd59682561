"""Data is split in shards, of which each rank reads another one in this epoch; the cost goes by epoch.

Style: fairseq: shard in the key, list by epoch
"""

import torch
import torch.distributed as dist


def main():
    rank, cost = dist.get_rank(), []
    for epoch in range(1, 4):
        shard = (epoch + rank) % 4
        stats = {f"shard{shard:02d}": torch.tensor(0.5 * epoch)}
        for _, value in stats.items():
            dist.all_reduce(value)  # label: "cost of an epoch"
            cost.append(value.item())
    return cost
