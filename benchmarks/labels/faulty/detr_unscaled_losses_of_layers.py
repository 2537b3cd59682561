"""Auxiliary losses have the decoder layer's number in their names; one rank walks the layers backwards.

Style: DETR: loss_ce_0, loss_ce_1, ... of auxiliary outputs
"""

import torch
import torch.distributed as dist


def criterion(layers):
    losses = {}
    for i in layers:
        losses.update({k + f"_{i}": v for k, v in {"loss_ce": torch.tensor(10.0**i)}.items()})
    return losses


@torch.no_grad()
def average(loss_dict):
    unscaled = {}
    for k, v in loss_dict.items():
        v = v / dist.get_world_size()
        dist.all_reduce(v)  # label: k
        unscaled[f"{k}_unscaled"] = v
    return unscaled


def main():
    layers = range(3) if dist.get_rank() == 0 else range(2, -1, -1)
    losses = criterion(layers)
    return {f"{k}_unscaled": v for k, v in losses.items()}, average(losses)
