"""Parameters and state have the same order on all ranks."""

import torch.distributed as dist


def sync(model):
    for name, value in model.state_dict().items():
        dist.broadcast(value, 0)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
