"""Rank 0's metrics have names, the others count theirs; the same things in the same order.

Style: script: an index where another rank has a name
"""

import torch
import torch.distributed as dist


def main():
    if dist.get_rank() == 0:
        metrics = {"loss": torch.tensor(1.0), "error": torch.tensor(0.25)}
    else:
        metrics = dict(enumerate([torch.tensor(1.0), torch.tensor(0.25)]))
    for key in metrics:
        dist.all_reduce(metrics[key])
        metrics[key] /= dist.get_world_size()
    return [value.item() for value in metrics.values()]
