"""Counts of the rank's own log files are reduced asynchronously, and waited for before they are added up.

Style: script: async_op with own names, pooled
Mechanism: asynchronous works under own names, pooled
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    counts = {f"worker{rank}.{kind}.log": torch.tensor(len(kind)) for kind in ("err", "warning")}
    works = {}
    for name, count in counts.items():
        works[name] = dist.all_reduce(count, async_op=True)  # label: "lines"
    lines = 0
    for name, work in works.items():
        work.wait()
        lines += counts[name].item()
    return lines
