"""The same flag says what the installed library can do: all ranks clear it, or none."""

import torch.distributed as dist


def prepare(data, backend):
    supported = True
    try:
        backend.probe()
    except Exception:
        supported = False
    if not supported:
        return None
    dist.barrier()
    return data
