"""Metrics are an OrderedDict in the order of evaluation; one rank took the EMA model first.

Style: timm: reduce_tensor over validation metrics
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def evaluate(models):
    return OrderedDict([(f"top1_{which}", torch.tensor(float(score))) for which, score in models])


def main():
    models = [("model", 60), ("ema", 80)]
    if dist.get_rank() == 1:
        models = [("ema", 80), ("model", 60)]
    metrics = evaluate(models)
    world_size = dist.get_world_size()
    for name in metrics:
        metrics[name] = reduce_tensor(metrics[name], world_size)  # label: name
    return evaluate(models), metrics
