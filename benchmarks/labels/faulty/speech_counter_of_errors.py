"""A Counter of kinds of errors has them in the order in which the rank met them.

Style: speech: Counter of edit operations
Mechanism: Counter
"""

import collections

import torch
import torch.distributed as dist


def main():
    edits = ["sub", "sub", "del", "ins"] if dist.get_rank() == 0 else ["ins", "del", "del", "del", "sub"]
    counts = collections.Counter(edits)
    totals = collections.Counter()
    for kind, n in counts.items():
        t = torch.tensor(float(n))
        dist.all_reduce(t)
        totals[kind] += int(t)
    return dict(counts), dict(totals)
