"""The error is passed to a function of the file that only prints it."""

import torch.distributed as dist


def show(error):
    print("skipped:", error)


def run(model, batch):
    error = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)  # missed: swallowed-error
    except RuntimeError as e:
        error = e
    show(error)
