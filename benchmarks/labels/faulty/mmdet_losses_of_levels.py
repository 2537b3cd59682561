"""Losses are lists over feature levels, nested in a dict; the names of the flat ones are made with enumerate.

Style: mmengine: losses as lists of levels
"""

import torch
import torch.distributed as dist


def bbox_head_loss(order):
    values = {"loss_cls": [1.0, 2.0], "loss_iou": [30.0, 40.0]}
    return {name: [torch.tensor(v) for v in values[name]] for name in order}


def parse(losses):
    log_vars = dict()
    for loss_name, loss_value in losses.items():
        for level, _loss in enumerate(loss_value):
            _loss = _loss.detach().clone()
            dist.all_reduce(_loss.div_(dist.get_world_size()))  # label: f"{loss_name}.{level}"
            log_vars[f"{loss_name}/{level}"] = _loss
    return log_vars


def main():
    order = ["loss_cls", "loss_iou"]
    losses = bbox_head_loss(order[:: 1 if dist.get_rank() == 0 else -1])
    return losses, parse(losses)
