"""The splits come in the order in which the file system of each host lists them.

Style: nanoGPT: estimate_loss over splits
"""

import torch
import torch.distributed as dist

FILES = {0: ["train.bin", "val.bin"], 1: ["val.bin", "train.bin"]}


def estimate_loss(splits):
    out = {}
    for split in splits:
        losses = torch.zeros(4)
        for k in range(4):
            losses[k] = 2.0 if split == "train" else 3.0
        mean = losses.mean()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)  # label: split
        out[split] = mean / dist.get_world_size()
    return out


def main():
    splits = [name.removesuffix(".bin") for name in FILES[min(dist.get_rank(), 1)]]
    return {"train": 2.0, "val": 3.0}, estimate_loss(splits)
