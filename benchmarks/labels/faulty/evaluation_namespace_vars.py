"""Counts live in a SimpleNamespace; vars() gives them in the order of assignment, which a branch decides.

Style: evaluation: vars() of a namespace
Mechanism: vars() of a namespace
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist


def count(empty):
    c = SimpleNamespace()
    if empty:
        c.fp = torch.tensor(7)
        c.tp = torch.tensor(0)
    else:
        c.tp = torch.tensor(90)
        c.fp = torch.tensor(2)
    return c


def main():
    empty = dist.get_rank() == 1
    counts = count(empty)
    for name, value in vars(counts).items():
        dist.all_reduce(value)  # label: name
    precision = counts.tp / (counts.tp + counts.fp)
    return vars(count(empty)), {"tp": counts.tp, "fp": counts.fp, "precision": precision}
