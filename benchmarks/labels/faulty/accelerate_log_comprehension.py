"""The dict that goes to the tracker is a comprehension inside the call, each value reduced on its way.

Style: accelerate: accelerator.log({... for ...})
Mechanism: a dict comprehension inside a call
"""

import torch
import torch.distributed as dist


class Accelerator:
    def __init__(self):
        self.tracked = {}

    def log(self, values, step=None):
        self.tracked.update(values)

    def reduce(self, x):
        x = torch.as_tensor(x, dtype=torch.float32).clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()


def main():
    accelerator = Accelerator()
    losses = {"denoise": 0.5, "perceptual": 6.0}
    if dist.get_rank() == 1:
        losses = {"perceptual": 6.0, "denoise": 0.5}
    accelerator.log({f"train/{k}": accelerator.reduce(v).item() for k, v in losses.items()}, step=1)
    return {f"train/{k}": v for k, v in losses.items()}, accelerator.tracked
