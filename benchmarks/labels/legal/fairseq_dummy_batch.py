"""A rank that ran out of data reduces a dummy batch's statistics, from a dict that says so.

Style: fairseq: dummy batch on a rank without data
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    if rank == 0:
        sample = {"nsentences": torch.tensor(4.0)}
        size = sample["nsentences"]
    else:
        dummy = {"ignored": torch.tensor(0.0)}
        size = dummy["ignored"]
    dist.all_reduce(size)  # label: "sample size"
    return size.item()
