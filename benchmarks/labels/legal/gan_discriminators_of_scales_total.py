"""Losses of the discriminators' scales, in own order, are one loss, made by a function from a list.

Style: GAN: multi-scale discriminators
"""

import functools
import operator

import torch
import torch.distributed as dist


def main():
    losses = {"scale1": torch.tensor(1.0), "scale2": torch.tensor(2.0), "half": torch.tensor(4.0)}
    names = sorted(losses, reverse=bool(dist.get_rank()))
    parts = []
    for name in names:
        part = losses[name].clone()
        dist.all_reduce(part)
        parts.append(part)
    return functools.reduce(operator.add, parts).item()
