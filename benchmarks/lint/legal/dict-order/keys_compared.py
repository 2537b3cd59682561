"""The ranks have compared their keys before."""

import torch.distributed as dist


def reduce_losses(losses):
    all_keys = [None] * dist.get_world_size()
    dist.all_gather_object(all_keys, list(losses))
    if any(keys != all_keys[0] for keys in all_keys):
        raise ValueError("ranks have other keys")
    for name, value in losses.items():
        dist.all_reduce(value)
