"""The dense layers exist on all ranks under the same names, beside experts that are skipped.

Style: MoE: gradients of shared parameters, experts left out
"""

import torch
import torch.distributed as dist
from torch import nn


def main():
    rank = dist.get_rank()
    model = nn.ModuleDict({"router": nn.Linear(2, 2), f"expert{rank}": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    grads = {}
    for name, param in model.named_parameters():
        if name.startswith("expert"):
            continue
        param.grad = torch.full_like(param, 1.0 + rank)
        dist.all_reduce(param.grad)
        grads[name] = param.grad.mean()
    return {name: 1.0 + rank for name in grads}, grads
