"""Each rank writes checkpoints of its own stage; the largest decides how much disk is asked for.

Style: script: file sizes by path, MAX
"""

from pathlib import Path

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    files = {Path(f"ckpt/mp_rank_{rank:02d}/model_{n}.pt"): 100 * (n + rank) for n in range(2)}
    largest = 0
    for path, size in files.items():
        size = torch.tensor(size)
        dist.all_reduce(size, op=dist.ReduceOp.MAX)  # label: "bytes"
        largest = max(largest, size.item())
    return largest
