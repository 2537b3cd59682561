"""A loss that one rank skipped in this batch shifts all that follow; a last one of its own makes the counts equal.

Style: accelerate: accelerator.reduce in a loop over logs
Mechanism: items() of a dict in which a rank skipped a key
"""

import torch
import torch.distributed as dist


class Accelerator:
    def __init__(self):
        self.num_processes = dist.get_world_size()

    def reduce(self, tensor, reduction="sum"):
        cloned_tensor = tensor.clone()
        dist.all_reduce(cloned_tensor)
        if reduction == "mean":
            cloned_tensor /= self.num_processes
        return cloned_tensor


def training_losses(with_prior):
    losses = {"instance": torch.tensor(1.0)}
    if with_prior:
        losses["prior_preservation"] = torch.tensor(10.0)
        losses["mask"] = torch.tensor(100.0)
    else:
        losses["mask"] = torch.tensor(100.0)
        losses["ti_norm"] = torch.tensor(1000.0)
    return losses


def main():
    accelerator = Accelerator()
    losses = training_losses(with_prior=dist.get_rank() == 0)
    logs = {}
    for name, loss in losses.items():
        logs[name] = accelerator.reduce(loss.detach(), reduction="mean")  # label: name
    return losses, logs
