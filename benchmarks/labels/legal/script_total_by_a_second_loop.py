"""One loop reduces the losses, a second one adds them up.

Style: script: reduced in one loop, added up in the next
Mechanism: reduced in one loop, added up in the next
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def main():
    losses = own_losses()
    for name in losses:
        dist.all_reduce(losses[name])  # label: "part of the total"
    total = torch.zeros(1)
    for name in losses:
        total += losses[name]
    return total.item()
