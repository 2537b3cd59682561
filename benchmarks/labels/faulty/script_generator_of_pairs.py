"""A generator yields (name, reduced value) as it is drawn from; the logger builds a dict of it.

Style: script: generator function that reduces
Mechanism: a generator that yields pairs
"""

import torch
import torch.distributed as dist


def reduced(stats):
    for name, value in stats:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)  # label: name
        yield name, tensor.item()


def main():
    stats = [("gpu_hours", 2.0), ("samples", 5000.0)]
    if dist.get_rank() == 1:
        stats.insert(0, stats.pop())
    return dict(stats), dict(reduced(stats))
