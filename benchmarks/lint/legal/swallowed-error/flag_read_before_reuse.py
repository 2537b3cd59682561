"""The flag ends the run after an error; later it is set again for another purpose."""

import torch.distributed as dist


def prepare(path, count):
    failed = False
    try:
        count += read(path)
        dist.all_reduce(count)
    except Exception:
        failed = True
    if failed:
        raise RuntimeError(f"cannot read {path}")
    failed = True
    return failed
