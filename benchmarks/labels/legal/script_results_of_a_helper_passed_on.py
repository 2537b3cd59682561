"""A list of a helper's results is passed to a function that adds them up.

Style: script: list of a helper's results, passed on
Mechanism: a list of a helper's results, passed to a function
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def reduced(loss):
    dist.all_reduce(loss)  # label: "part of the total"
    return loss


def combined(parts):
    total = torch.zeros(1)
    for part in parts:
        total = total + part
    return total.item()


def main():
    losses, parts = own_losses(), []
    for loss in losses.values():
        parts.append(reduced(loss))
    return combined(parts)
