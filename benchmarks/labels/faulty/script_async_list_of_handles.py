"""Handles are kept in a list with their names, and waited for in a second loop.

Style: script: async_op, list of (name, tensor, work)
"""

import torch
import torch.distributed as dist


def main():
    stats = {"grad_norm": torch.tensor(0.1), "throughput": torch.tensor(900.0)}
    if dist.get_rank() == 1:
        stats = {"throughput": torch.tensor(800.0), "grad_norm": torch.tensor(0.3)}
    held = {k: v.clone() for k, v in stats.items()}
    pending = []
    for name, value in stats.items():
        pending.append((name, value, dist.all_reduce(value, async_op=True)))
    reduced = {}
    for name, value, work in pending:
        work.wait()
        reduced[name] = value / 2
    return held, reduced
