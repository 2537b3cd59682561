"""Stats are worked off with popitem(); the last in is the first out, and the order of coming in differs.

Style: script: while stats with popitem
Mechanism: popitem()
"""

import torch
import torch.distributed as dist


def flush(stats):
    flushed = {}
    while stats:
        key, value = stats.popitem()
        value = torch.as_tensor(value)
        dist.all_reduce(value)
        flushed[key] = value.item()
    return flushed


def main():
    stats = {"queue_len": 3.0, "latency": 250.0}
    if dist.get_rank() == 1:
        stats = {"latency": 200.0, "queue_len": 5.0}
    return dict(stats), flush(dict(stats))
