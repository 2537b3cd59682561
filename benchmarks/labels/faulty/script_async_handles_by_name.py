"""All reductions are started at once, the handles kept by name and waited for later; the ranks' orders differ.

Style: script: async_op with a dict of handles
Mechanism: asynchronous works kept by name
"""

import torch
import torch.distributed as dist


def start(stats):
    handles = {}
    for name, value in stats.items():
        handles[name] = dist.all_reduce(value, async_op=True)  # label: name
    return handles


def make():
    stats = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(50.0)}
    if dist.get_rank() == 1:
        stats = dict(reversed(stats.items()))
    return stats


def main():
    stats = make()
    handles = start(stats)
    for name in handles:
        handles[name].wait()
    return make(), stats
