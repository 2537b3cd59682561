"""Rank 0 makes a cache while the others wait, if it is for training: the two branches complete each other."""

import torch.distributed as dist


def load(args, evaluate=False):
    if args.local_rank not in [-1, 0] and not evaluate:
        dist.barrier()
    features = read_or_make(args)
    if args.local_rank == 0 and not evaluate:
        dist.barrier()
    return features
