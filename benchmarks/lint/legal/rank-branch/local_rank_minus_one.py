"""A local rank of -1 means that the job is not distributed."""

import torch.distributed as dist


def main(args):
    if args.local_rank != -1:
        dist.barrier()
