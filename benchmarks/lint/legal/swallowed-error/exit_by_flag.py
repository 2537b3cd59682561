"""The error clears a flag by which the process exits."""

import sys

import torch.distributed as dist


def run(model, x):
    ok = True
    try:
        loss = model(x)
        dist.all_reduce(loss)
    except Exception as e:
        print(e)
        ok = False
    if not ok:
        sys.exit(1)
    print("done")
