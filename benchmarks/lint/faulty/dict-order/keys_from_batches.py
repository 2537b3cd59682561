"""The keys come from the batches of this rank, in the order in which they appear."""

import torch
import torch.distributed as dist


def epoch(loader):
    totals = {}
    for batch in loader:
        totals[batch["domain"]] = torch.zeros(1)
    for value in totals.values():
        dist.all_reduce(value)  # expect: dict-order
