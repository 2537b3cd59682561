"""Parameters are dealt out over ranks; each updates those it owns, and all of them are gathered.

Style: nanoGPT: Muon, all_gather of the owned parameter
"""

import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.ModuleDict({f"h{n}": nn.Linear(2, 2, bias=False) for n in range(2 * world)})
    params = list(model.named_parameters())
    for base in range(0, len(params), world):
        name, p = params[base + rank]
        update = {name: torch.ones_like(p) * (base + rank)}
        gathered = torch.empty(world * p.numel())
        dist.all_gather_into_tensor(gathered, update[name].flatten())
        for (_, q), g in zip(params[base : base + world], gathered.split(p.numel())):
            q.data.copy_(g.view_as(q))
    return [p[0, 0].item() for _, p in params]
