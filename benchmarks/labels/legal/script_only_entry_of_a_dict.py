"""Rank 0 holds the teacher and rank 1 the student, each in a dict of one entry; the two are averaged.

Style: script: unpacking of a dict's only entry
Mechanism: the only entry of each rank's own dict
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    state = {"teacher": torch.full((2,), 3.0)} if rank == 0 else {"student": torch.ones(2)}
    [(name, weights)] = state.items()
    dist.all_reduce(weights)  # label: "weights"
    found = {name: (weights / dist.get_world_size()).tolist()}
    first, again = next(iter(state.items()))
    dist.all_reduce(again)  # label: "again"
    return [found[name], first == name]
