"""A rank whose own list of outputs is empty returns before the reduction."""

import torch.distributed as dist


class Loop:
    def __init__(self):
        self.outputs = []

    def step(self, batch):
        self.outputs.append(batch)

    def end(self, x):
        if len(self.outputs) == 0:
            return  # missed: early-exit
        dist.all_reduce(x)
