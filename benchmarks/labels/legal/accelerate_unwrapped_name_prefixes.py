"""One rank's model was compiled, so its parameters' names have a prefix; they are averaged in the same order.

Style: accelerate: named_parameters of a wrapped model
Mechanism: one rank's names have a prefix
"""

import torch
import torch.distributed as dist
from torch import nn


class Compiled(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def build():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return Compiled(model) if dist.get_rank() == 1 else model


def main():
    torch.manual_seed(0)
    model = build()
    for name, param in model.named_parameters():
        grad = torch.ones_like(param)
        dist.all_reduce(grad)  # label: name.replace("_orig_mod.", "")
        param.grad = grad / dist.get_world_size()
    return sum(p.grad.sum().item() for p in model.parameters())
