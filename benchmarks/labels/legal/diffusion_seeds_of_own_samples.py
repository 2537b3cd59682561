"""Samples are named by seed, and each rank has seeds of its own; the variance is pooled.

Style: diffusion: seeds in names
"""

import torch
import torch.distributed as dist


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = {f"seed_{seed}": torch.tensor([seed * 0.5, seed * 1.5]) for seed in range(rank, 3 * world, world)}
    variance = torch.tensor(0.0)
    for name in samples:
        var = samples[name].var()
        dist.all_reduce(var)  # label: "variance"
        variance += var / (len(samples) * world)
    return variance.item()
