"""A rank that cannot read its file clears a flag, by which it leaves before the others' barrier."""

import torch.distributed as dist


def prepare(data, path):
    ok = True
    try:
        data.read(path)
    except Exception:
        ok = False
    if not ok:
        return None  # missed: early-exit
    dist.barrier()
    return data
