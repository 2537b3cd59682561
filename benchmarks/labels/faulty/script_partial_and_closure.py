"""A closure made by a factory reduces what it is given; it is called for each name of the rank's own stats.

Style: script: functools.partial and a closure
Mechanism: functools.partial and a closure
"""

import functools

import torch
import torch.distributed as dist


def make_reducer(world_size):
    def reducer(value, op):
        out = value.float().mean()
        dist.all_reduce(out, op=op)
        return out / world_size

    return functools.partial(reducer, op=dist.ReduceOp.SUM)


def measure(names):
    values = {"psnr": [30.0, 32.0], "ssim": [0.5, 0.75], "lpips": [8.0, 8.0]}
    return {name: torch.tensor(values[name]) for name in names}


def main():
    names = ["psnr", "ssim", "lpips"] if dist.get_rank() == 0 else ["ssim", "lpips", "psnr"]
    reducer = make_reducer(dist.get_world_size())
    stats = measure(names)
    averaged = {}
    for name in stats:
        averaged[name] = reducer(stats[name])  # label: name
    return {name: value.mean() for name, value in stats.items()}, averaged
