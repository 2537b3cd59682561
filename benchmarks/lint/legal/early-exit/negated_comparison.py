"""The ranks that leave do so without a checkpoint, and the broadcasts need one."""

import torch.distributed as dist


def resume(path, kind, weights):
    rank = dist.get_rank()
    if path is None and rank != 0:
        return
    if kind == "none" and rank != 0:
        return
    weights.prepare()
    if path is not None and kind != "none":
        dist.broadcast(weights.tensor, src=0)
