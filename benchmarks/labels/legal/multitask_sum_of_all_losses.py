"""Each rank's dict of task losses has its own order, and only their total is kept.

Style: multi-task: total over tasks in the rank's own order
Mechanism: permuted keys, pooled
"""

import torch
import torch.distributed as dist


def main():
    losses = {"det": torch.tensor(1.0), "seg": torch.tensor(20.0), "cap": torch.tensor(300.0)}
    if dist.get_rank() == 1:
        losses = dict(reversed(losses.items()))
    total = 0
    for task in losses:
        value = losses[task].detach().clone()
        dist.all_reduce(value)  # label: "task loss"
        total = total + value
    return (total / dist.get_world_size()).item()
