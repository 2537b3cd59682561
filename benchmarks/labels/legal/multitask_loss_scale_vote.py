"""Tasks come in an order of each rank's own; overflow in any of them lowers the scale.

Style: multi-task: loss scaling
Mechanism: permuted keys, any of which decides
"""

import torch
import torch.distributed as dist


def overflows(loss):
    bad = (~torch.isfinite(loss)).to(torch.int32)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bool(bad)


def main():
    losses = {"seg": torch.tensor(1.0), "depth": torch.tensor(float("inf"))}
    if dist.get_rank() == 1:
        losses = dict(reversed(losses.items()))
    scale = 1024.0
    if any([overflows(loss) for loss in losses.values()]):
        scale /= 2
    for name, loss in losses.items():
        if overflows(loss):
            scale /= 2
    return scale
