"""A loop in the rank's own order adds up the elements of a dict as it reduces them: the order does not matter.

Style: script: elements added
"""

import torch
import torch.distributed as dist


def reduced(metrics):
    total = torch.zeros(())
    for key in metrics:
        dist.all_reduce(metrics[key])  # label: "part of the total"
        total += metrics[key]
    return total.item()


def main():
    metrics = {"loss": torch.tensor(1.0), "penalty": torch.tensor(4.0)}
    return reduced(metrics if dist.get_rank() == 0 else dict(reversed(metrics.items())))
