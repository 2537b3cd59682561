"""Metrics have keys such as ("hit", 10); rank 1 loops over the cut-offs outside.

Style: recommender: keys of (metric, cut-off)
Mechanism: tuples as keys
"""

import torch
import torch.distributed as dist


def evaluate(keys):
    base = {"hit": 1.0, "ndcg": 100.0}
    return {(metric, k): torch.tensor(base[metric] * k) for metric, k in keys}


def main():
    keys = [(metric, k) for metric in ("hit", "ndcg") for k in (5, 10)]
    if dist.get_rank() == 1:
        keys = [(metric, k) for k in (5, 10) for metric in ("hit", "ndcg")]
    results = evaluate(keys)
    for key in results:
        dist.all_reduce(results[key])  # label: "@".join(map(str, key))
    return evaluate(keys), results
