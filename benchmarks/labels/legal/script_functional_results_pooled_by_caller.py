"""New tensors of a functional collective are collected in a list, and the caller adds them up.

Style: script: functional collectives, results collected
Mechanism: a functional collective's results, added up by the caller
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def own_losses():
    own = "l1_loss" if dist.get_rank() else "snr_loss"
    return {"loss": torch.tensor([4.0]), own: torch.tensor([2.0])}


def reduced(losses):
    parts = []
    for loss in losses.values():
        parts.append(funcol.all_reduce(loss, "sum", dist.group.WORLD))  # label: "part of the total"
    return parts


def main():
    return torch.cat(reduced(own_losses())).sum().item()
