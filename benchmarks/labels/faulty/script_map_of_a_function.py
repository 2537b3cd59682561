"""The reduced values come from map() over the values and are put beside the keys again.

Style: script: map and zip
Mechanism: map()
"""

import torch
import torch.distributed as dist


def allreduce(value):
    tensor = torch.as_tensor(value, dtype=torch.float32)
    dist.all_reduce(tensor)
    return tensor.item()


def main():
    metrics = {"mae": 1.0, "rmse": 20.0} if dist.get_rank() == 0 else {"rmse": 20.0, "mae": 1.0}
    reduced = dict(zip(metrics, map(allreduce, metrics.values())))
    return metrics, reduced
