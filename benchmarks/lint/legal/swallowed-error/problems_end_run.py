"""The numbers of failed batches go to a function that exits the process."""

import sys

import torch.distributed as dist


def finish(found):
    if found:
        sys.exit(f"{len(found)} batches have failed")


def run(model, batches):
    bad = []
    for number, batch in enumerate(batches):
        try:
            loss = model(batch)
            dist.all_reduce(loss)
        except RuntimeError:
            bad.append(number)
    finish(bad)
