"""A list of a helper's results is returned to a caller who adds them up.

Style: script: list of a helper's results, returned
"""

import torch
import torch.distributed as dist


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def reduced(loss):
    dist.all_reduce(loss)  # label: "part of the total"
    return loss


def all_reduced(losses):
    return [reduced(loss) for loss in losses.values()]


def main():
    return sum(all_reduced(own_losses())).item()
