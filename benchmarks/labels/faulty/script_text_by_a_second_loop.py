"""One loop reduces the losses, a second one writes them into a line of the log.

Style: script: reduced in one loop, printed in the next
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def main():
    losses = own_losses()
    for name in losses:
        dist.all_reduce(losses[name])  # label: name
    line = ""
    for name, loss in losses.items():
        line += f"{name}={loss.item()} "
    print(line)
    return own_losses(), {name: loss.item() for name, loss in losses.items()}
