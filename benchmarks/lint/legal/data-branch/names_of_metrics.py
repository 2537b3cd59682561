"""The lists hold names of metrics, and no values."""

import torch.distributed as dist


def evaluate(model, loader, metrics, losses=("loss", "acc")):
    feats = run(model, loader)
    if "fid" in metrics or "acc" in losses or len(losses) == 0:
        dist.all_reduce(feats)
