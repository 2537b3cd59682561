"""A helper reduces one loss; a list of its results is added up.

Style: script: comprehension over a helper, then sum
Mechanism: a list of a helper's results, added up
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def reduced(loss):
    dist.all_reduce(loss)  # label: "part of the total"
    return loss


def main():
    losses = own_losses()
    parts = [reduced(losses[name]) for name in sorted(losses)]
    return sum(parts).item()
