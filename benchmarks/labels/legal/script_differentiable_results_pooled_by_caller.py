"""Results of the differentiable all_reduce are returned as a list, and the caller takes their mean.

Style: script: torch.distributed.nn.all_reduce, results collected
"""

import torch
import torch.distributed as dist
from torch.distributed.nn import all_reduce


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def reduced(losses):
    return [all_reduce(loss) for loss in losses.values()]


def main():
    return torch.stack(reduced(own_losses())).mean().item()
