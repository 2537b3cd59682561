"""Lengths of packed sequences of the rank's own batch, by a name made from document and offset, in one token count.

Style: transformers: num_items_in_batch from packed sequences
"""

import torch
import torch.distributed as dist


def pack(rank):
    return {f"doc{7 * rank + n}:{128 * n}": torch.ones(10 + n) for n in range(3)}


def main():
    num_items_in_batch = torch.tensor(0.0)
    for span, labels in pack(dist.get_rank()).items():
        n = (labels != -100).sum().float()
        dist.all_reduce(n)  # label: "items"
        num_items_in_batch = num_items_in_batch + n
    return num_items_in_batch.item()
