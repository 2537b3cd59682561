"""Running statistics are averaged over ranks; rank 1's model is wrapped, so that its names start with module.

Style: timm: distribute_bn over buffers
"""

import torch.distributed as dist
from torch import nn


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def main():
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    for layer in model:
        layer.running_mean += rank
    wrapped = Wrapped(model) if rank == 1 else model
    for bn_name, bn_buf in wrapped.named_buffers(recurse=True):
        if "running_mean" in bn_name or "running_var" in bn_name:
            dist.all_reduce(bn_buf)  # label: bn_name.removeprefix("module.")
            bn_buf /= float(dist.get_world_size())
    return model[0].running_mean.sum().item()
