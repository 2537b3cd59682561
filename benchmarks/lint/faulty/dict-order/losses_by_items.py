"""The losses are reduced in the order of the dict, which may differ between ranks."""

import torch.distributed as dist


def reduce_losses(losses):
    for name, loss in losses.items():
        dist.all_reduce(loss)  # expect: dict-order
        losses[name] = loss / dist.get_world_size()
