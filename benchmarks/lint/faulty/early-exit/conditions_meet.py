"""The broadcast runs where the model is sharded, and ranks other than 0 leave early there as well."""

import torch.distributed as dist


def evaluate(args, flag):
    sharded = args.fsdp
    is_first = dist.get_rank() == 0
    if sharded and not is_first:
        return  # expect: early-exit
    if sharded:
        dist.broadcast(flag, src=0)
