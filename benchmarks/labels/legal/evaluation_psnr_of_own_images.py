"""PSNR of each rank's own test images, into a running mean kept in an object.

Style: evaluation: AverageMeter over own images
"""

import torch
import torch.distributed as dist


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n


def reduce_mean(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt)
    return rt / dist.get_world_size()


def main():
    rank = dist.get_rank()
    restored = {name: torch.tensor(30.0 + n) for n, name in enumerate((f"baby_{rank}.png", f"bird_{rank}.png"))}
    meter = AverageMeter()
    for name, psnr in restored.items():
        meter.update(reduce_mean(psnr).item(), dist.get_world_size())  # label: "psnr"
    return meter.sum / meter.count
