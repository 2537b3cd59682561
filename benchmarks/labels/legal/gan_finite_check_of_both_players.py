"""The generator's rank and the discriminator's rank check that all losses are finite, by their sum.

Style: GAN: one network per rank, sum only for isfinite
"""

import torch
import torch.distributed as dist


def main():
    losses = {"loss_G": torch.tensor(0.7)} if dist.get_rank() == 0 else {"loss_D": torch.tensor(1.3)}
    for name, loss in losses.items():
        everyone = loss.detach().clone()
        dist.all_reduce(everyone)  # label: "finite"
        if not torch.isfinite(everyone):
            raise FloatingPointError(f"{name} or another rank's loss is not finite")
    return {name: loss.item() for name, loss in losses.items()}
