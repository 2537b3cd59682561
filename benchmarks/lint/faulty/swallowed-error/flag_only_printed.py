"""The error sets a flag that is only printed."""

import torch.distributed as dist


def run(model, x):
    ok = True
    try:
        loss = model(x)
        dist.all_reduce(loss)  # missed: swallowed-error
    except Exception as e:
        error = str(e)
        ok = False
    if not ok:
        print("failed", error)
