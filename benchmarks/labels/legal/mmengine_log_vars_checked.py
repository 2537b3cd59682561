"""The lengths and names are checked before, and each value is reduced under its name.

Style: mmengine: log_vars with a check of their number
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


def main():
    log_vars = OrderedDict(loss_cls=torch.tensor([1.0, 3.0]), loss_bbox=torch.tensor([5.0, 7.0]))
    held = {name: value.mean() for name, value in log_vars.items()}
    length = torch.tensor(len(log_vars))
    dist.all_reduce(length)
    assert length == len(log_vars) * dist.get_world_size()
    for name, value in log_vars.items():
        value = value.mean().data.clone()
        dist.all_reduce(value.div_(dist.get_world_size()))
        log_vars[name] = value.item()
    return held, log_vars
