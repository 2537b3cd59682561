"""Experts' parameters have other names on each rank; the norm of all of them is one number.

Style: MoE: clip_grad_norm over expert parameters
"""

import torch
import torch.distributed as dist
from torch import nn


def main():
    rank = dist.get_rank()
    experts = nn.ModuleDict({f"expert_{rank}": nn.Linear(2, 2)})
    for param in experts.parameters():
        param.grad = torch.full_like(param, 2.0)
    norms = []
    for name, param in experts.named_parameters():
        norm = torch.linalg.vector_norm(param.grad) ** 2
        dist.all_reduce(norm)  # label: "expert norm"
        norms.append(norm)
    return torch.stack(norms).sum().sqrt().item()
