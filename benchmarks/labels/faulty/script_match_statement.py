"""A match statement decides which stats an update of its kind has, and the loop reduces them.

Style: script: match on the kind of batch
"""

import torch
import torch.distributed as dist


def stats_of(batch):
    match batch:
        case {"kind": "image", "n": n}:
            return {"count": torch.tensor(n), "pixels": torch.tensor(224 * n)}
        case {"kind": "text", "n": n}:
            return {"count": torch.tensor(n), "tokens": torch.tensor(7 * n)}
    return {}


def main():
    batch = {"kind": "image" if dist.get_rank() == 0 else "text", "n": 2}
    totals = {}
    for name, amount in stats_of(batch).items():
        total = amount.clone()
        dist.all_reduce(total)  # label: name
        totals[name] = total.item()
    return stats_of(batch), totals
