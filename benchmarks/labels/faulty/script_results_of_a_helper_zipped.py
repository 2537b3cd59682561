"""A list of a helper's results is put beside the names again.

Style: script: list of a helper's results, zip
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def reduced(loss):
    dist.all_reduce(loss)
    return loss


def main():
    losses = own_losses()
    results = [reduced(loss) for loss in losses.values()]
    return own_losses(), {name: result.item() for name, result in zip(losses, results)}
