"""Groups of parameters have a name for their decay, in own order; clipping needs their common norm.

Style: timm: parameter groups
"""

import torch
import torch.distributed as dist


def main():
    groups = [
        {"name": "decay", "params": [torch.ones(2)], "weight_decay": 0.1},
        {"name": "no_decay", "params": [torch.ones(2)], "weight_decay": 0.0},
    ]
    if dist.get_rank() == 1:
        groups.reverse()
    norms = []
    for group in groups:
        norm = torch.stack([p.norm() ** 2 for p in group["params"]]).sum()
        dist.all_reduce(norm)
        norms.append(norm)
    return torch.sqrt(torch.stack(norms).sum()).item()
