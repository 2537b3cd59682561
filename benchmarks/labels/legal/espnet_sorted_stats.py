"""The dicts are filled in different order, and sorted before they are reduced.

Style: espnet: sorted() over stats
Mechanism: sorted keys, reduced in place
"""

import torch
import torch.distributed as dist


def make(reverse):
    pairs = [("loss_ctc", 10.0), ("loss_att", 2.0), ("acc", 0.5)]
    return {k: torch.tensor(v) for k, v in (pairs[::-1] if reverse else pairs)}


def main():
    reverse = dist.get_rank() == 1
    stats = make(reverse)
    for name, value in sorted(stats.items()):
        dist.all_reduce(value)
    return make(reverse), stats
