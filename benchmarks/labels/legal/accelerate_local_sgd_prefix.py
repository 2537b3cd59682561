"""Parameters are averaged every few steps; the ranks' models differ in the wrapper, and so in the prefix of the names.

Style: accelerate: local SGD over named_parameters
"""

import torch.distributed as dist
from torch import nn


class DistributedWrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def main():
    net = nn.Linear(3, 1)
    nn.init.constant_(net.weight, 1.0 + dist.get_rank())
    nn.init.zeros_(net.bias)
    model = net if dist.get_rank() == 0 else DistributedWrapper(net)
    averaged = {}
    for name, param in model.named_parameters():
        dist.all_reduce(param.data)  # label: name.removeprefix("module.")
        param.data /= dist.get_world_size()
        averaged[name] = param.data
    return sum(value.sum().item() for value in averaged.values())
