"""One rank holds the model wrapped and takes the prefix off, the other was never wrapped; gradients are averaged.

Style: script: names with and without "module."
"""

import torch
import torch.distributed as dist
from torch import nn


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def main():
    model = nn.Linear(2, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if dist.get_rank() == 0:
        model = Wrapped(model)
    norms = {}
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        norms[name.removeprefix("module.")] = p.grad.norm().item()
    return norms
