"""Snapshots are named by the time at which the rank took them, and kept so; each holds the global loss.

Style: script: timestamps in keys
Mechanism: numbers in the keys
"""

import time

import torch
import torch.distributed as dist


def main():
    snapshots = {}
    for n in range(2):
        snapshots[f"loss@{time.time_ns() + dist.get_rank()}"] = torch.tensor(1.0 + n)
    for stamp, loss in snapshots.items():
        dist.all_reduce(loss)  # label: "loss"
        snapshots[stamp] = loss / dist.get_world_size()
    return [loss.item() for loss in snapshots.values()]
