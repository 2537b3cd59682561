"""The broadcast runs where the model is sharded, and ranks other than 0 leave early where it is not."""

import torch.distributed as dist


def evaluate(args, flag):
    sharded = args.fsdp
    is_first = dist.get_rank() == 0
    if not sharded and not is_first:
        return
    if sharded:
        dist.broadcast(flag, src=0)
