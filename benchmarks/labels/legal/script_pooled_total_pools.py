"""A function that is called pooled_total adds up values in the rank's own order: its name says nothing.

Style: script: a total by a function called pooled_total
"""

import torch
import torch.distributed as dist


def pooled_total(metrics):
    total = torch.zeros(())
    for key in metrics:
        value = metrics[key].clone()
        dist.all_reduce(value)  # label: "part of the total"
        total += value
    return total


def main():
    metrics = {"loss": torch.tensor(1.0), "penalty": torch.tensor(4.0)}
    return pooled_total(metrics if dist.get_rank() == 0 else dict(reversed(metrics.items()))).item()
