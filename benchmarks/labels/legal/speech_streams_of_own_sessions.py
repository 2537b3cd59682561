"""Streaming sessions with generated names; latency of all chunks is averaged.

Style: speech: session names with a counter
"""

import itertools

import torch
import torch.distributed as dist


def main():
    counter = itertools.count(100 * dist.get_rank())
    sessions = {f"session-{next(counter)}": [0.1, 0.3] for _ in range(3)}
    latency = []
    for session, chunks in sessions.items():
        mean = torch.tensor(chunks).mean()
        dist.all_reduce(mean)  # label: "latency"
        latency.append(mean.item() / dist.get_world_size())
    return sum(latency) / len(latency)
