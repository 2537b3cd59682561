"""Gradients are reduced to their owners from the last parameter to the first, alike on all ranks.

Style: Megatron: ZeRO-2, reduce to the owner
"""

import torch
import torch.distributed as dist
from torch import nn


def main():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    owned = 0.0
    for n, (name, param) in enumerate(reversed(list(model.named_parameters()))):
        param.grad = torch.ones_like(param)
        owner = n % dist.get_world_size()
        dist.reduce(param.grad, dst=owner)
        if owner == dist.get_rank():
            owned += param.grad.sum().item()
    return owned
