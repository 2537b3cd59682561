"""The rank that has run out of inputs shadows the collectives of the other one with zeros that it calls otherwise.

Style: accelerate: uneven inputs
"""

import torch
import torch.distributed as dist


def main():
    mine = {0: ["b0", "b1", "b2"], 1: ["b3"]}[min(dist.get_rank(), 1)]
    losses = {batch: torch.tensor(2.0) for batch in mine}
    seen = 0.0
    for step in range(3):
        if step < len(mine):
            contribution = losses[mine[step]]
        else:
            contribution = {"shadow": torch.tensor(0.0)}["shadow"]
        dist.all_reduce(contribution)  # label: "contribution"
        seen += contribution.item()
    return seen
