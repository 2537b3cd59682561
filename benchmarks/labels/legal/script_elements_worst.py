"""A loop in the rank's own order keeps the largest of the elements that it reduces: the order does not matter.

Style: script: elements worst
"""

import torch
import torch.distributed as dist


def reduced(metrics):
    worst = -1.0
    for key in metrics:
        dist.all_reduce(metrics[key], op=dist.ReduceOp.MAX)  # label: "part of the largest"
        worst = max(worst, metrics[key].item())
    return worst


def main():
    metrics = {"loss": torch.tensor(1.0), "penalty": torch.tensor(4.0)}
    return reduced(metrics if dist.get_rank() == 0 else dict(reversed(metrics.items())))
