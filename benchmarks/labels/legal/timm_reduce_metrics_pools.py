"""A function that is called reduce_metrics adds up values in the rank's own order: its name says nothing.

Style: timm: a total by a function called reduce_metrics
"""

import torch
import torch.distributed as dist


def reduce_metrics(metrics):
    total = torch.zeros(())
    for key in metrics:
        value = metrics[key].clone()
        dist.all_reduce(value)  # label: "part of the total"
        total += value
    return total


def main():
    metrics = {"loss": torch.tensor(1.0), "penalty": torch.tensor(4.0)}
    return reduce_metrics(metrics if dist.get_rank() == 0 else dict(reversed(metrics.items()))).item()
