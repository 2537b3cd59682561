"""The loss is kept per bucket of noise levels, named when the bucket is first drawn.

Style: diffusion: loss by timestep bucket
"""

import torch
import torch.distributed as dist

DRAWN = {0: [50, 900], 1: [900, 50]}


def bucket(t):
    return "loss_t0_500" if t < 500 else "loss_t500_1000"


def main():
    sums = {}
    for t in DRAWN[min(dist.get_rank(), 1)]:
        name = bucket(t)
        sums[name] = sums.get(name, torch.zeros(())) + t / 10
    held = {name: float(value) for name, value in sums.items()}
    log = {}
    for name, value in sums.items():
        dist.all_reduce(value, op=dist.ReduceOp.SUM)  # label: name
        log["train/" + name] = value.item()
    return {"train/" + name: value for name, value in held.items()}, log
