"""The main process sorts its stats for the table that it prints, the others do not.

Style: transformers: TRL stats with slashes in their names
"""

import torch
import torch.distributed as dist


def all_reduce_stats(stats):
    keys = sorted(stats) if dist.get_rank() == 0 else stats
    reduced = {}
    for k in keys:
        t = torch.tensor(stats[k]).mean()
        dist.all_reduce(t, dist.ReduceOp.SUM)  # label: k
        reduced[k] = t / dist.get_world_size()
    return reduced


def main():
    stats = {"objective/kl": [0.5, 1.5], "env/reward_mean": [20.0, 20.0], "objective/entropy": [300.0, 300.0]}
    held = {k: sum(v) / len(v) for k, v in stats.items()}
    return held, all_reduce_stats(stats)
