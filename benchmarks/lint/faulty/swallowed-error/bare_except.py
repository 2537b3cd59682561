"""A bare `except` returns None on the rank that failed before the reduction."""

import torch.distributed as dist


def step(model, batch):
    try:
        loss = model(batch)
        dist.all_reduce(loss)  # expect: swallowed-error
        return loss
    except:
        return None
