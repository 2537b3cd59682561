"""Users are split by ranges of hashes, which are in the names; impressions are pooled.

Style: recommender: ranges in keys
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    impressions = {f"users-{16 * rank + 4 * n:02x}-{16 * rank + 4 * n + 3:02x}": 10 * n for n in range(4)}
    total = 0
    for bucket in sorted(impressions):
        t = torch.tensor([impressions[bucket]])
        dist.all_reduce(t)  # label: "impressions"
        total += t.item()
    return total
