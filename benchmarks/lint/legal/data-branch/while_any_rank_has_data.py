"""The loop runs while any rank has data, and only the local step is conditional."""

import torch
import torch.distributed as dist


def go(iterator):
    has_data = torch.ones(1)
    while has_data.item() > 0:
        batch = next(iterator, None)
        has_data.fill_(batch is not None)
        dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
        if batch is not None:
            step(batch)
