"""A flat script calls average(stats), which calls a reducer, which calls the collective on a new tensor.

Style: script: helpers three deep
"""

import torch
import torch.distributed as dist


def to_tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def sync(x):
    t = to_tensor(x)
    dist.all_reduce(t)
    return t.item()


def mean(x):
    return sync(x) / dist.get_world_size()


def average(stats):
    result = {}
    for name in stats:
        result[name] = mean(stats[name])  # label: name
    return result


def main():
    stats = {"bleu": 30.0, "chrf": 60.0, "ter": 1.5}
    if dist.get_rank() == 1:
        del stats["chrf"]
        stats["comet"] = 0.75
    return stats, average(stats)
