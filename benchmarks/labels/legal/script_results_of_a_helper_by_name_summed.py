"""A dict of a helper's results is made, and only added up.

Style: script: dict comprehension over a helper, then sum
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
    results = {name: reduced(loss) for name, loss in losses.items()}
    return sum(results.values()).item()
