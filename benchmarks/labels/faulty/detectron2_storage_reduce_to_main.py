"""Losses are reduced to rank 0 one by one; the mask head gave rank 1 loss_mask before loss_cls.

Style: detectron2: metrics written to an event storage
"""

import torch
import torch.distributed as dist


class EventStorage:
    def __init__(self):
        self.latest = {}

    def put_scalar(self, name, value):
        self.latest[name] = float(value)


def write_metrics(loss_dict, storage, prefix=""):
    metrics_dict = {k: v.detach().cpu() for k, v in loss_dict.items()}
    for name, value in metrics_dict.items():
        dist.all_reduce(value)  # label: name
        storage.put_scalar(prefix + name, value / dist.get_world_size())


def roi_heads(mask_first):
    box = {"loss_cls": torch.tensor(0.5), "loss_box_reg": torch.tensor(8.0)}
    mask = {"loss_mask": torch.tensor(64.0)}
    return {**mask, **box} if mask_first else {**box, **mask}


def main():
    storage = EventStorage()
    losses = roi_heads(mask_first=dist.get_rank() == 1)
    write_metrics(losses, storage)
    return losses, storage.latest
