"""Shards are written in an own order, with a vote after each that the disk is not full.

Style: accelerate: saving of sharded state
"""

import torch
import torch.distributed as dist


def main():
    shards = ["model", "optimizer", "scheduler"]
    if dist.get_rank() == 1:
        shards = shards[::-1]
    written = {}
    for shard in shards:
        written[shard] = f"{shard}.bin"
        ok = torch.tensor(1)
        dist.all_reduce(ok, op=dist.ReduceOp.MIN)
        if not ok.item():
            raise OSError(f"disk full at {shard}")
    return len(written)
