"""A tied weight has two names; one rank's checkpoint lists it under the other, and it is averaged once.

Style: federated: alias names of one tensor
Mechanism: one tensor under two names
"""

import torch
import torch.distributed as dist


def state(rank):
    shared = torch.full((2,), 1.0 + rank)
    if rank == 0:
        return {"wte.weight": shared, "lm_head.weight": shared, "bias": torch.zeros(2)}
    return {"lm_head.weight": shared, "wte.weight": shared, "bias": torch.zeros(2)}


def main():
    seen, mine = set(), state(dist.get_rank())
    for name, tensor in mine.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        dist.all_reduce(tensor)  # label: "bias" if name == "bias" else "tied"
        tensor /= dist.get_world_size()
    return {name: value.tolist() for name, value in sorted(mine.items())}
