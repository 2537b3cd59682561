"""The error is kept and raised after the timer has stopped."""

import torch.distributed as dist


def step(model, batch, timer):
    failed = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except RuntimeError as error:
        failed = error
    timer.stop()
    if failed is not None:
        raise failed
    return loss
