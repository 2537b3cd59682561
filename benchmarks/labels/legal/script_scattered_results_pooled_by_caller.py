"""Each rank's part of every loss is put into a new tensor; the caller adds these up.

Style: script: reduce_scatter_tensor, results collected
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def own_shards(losses):
    shards = []
    for loss in losses.values():
        shard = torch.empty(1)
        dist.reduce_scatter_tensor(shard, loss.repeat(2))  # label: "part of the total"
        shards.append(shard)
    return shards


def main():
    return torch.cat(own_shards(own_losses())).sum().item()
