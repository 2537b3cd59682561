"""Losses are divided and summed in place, in the order of the heads of each rank's config.

Style: detectron2: loss dict reduced in place
Mechanism: values of a dict, divided and reduced in place
"""

import torch
import torch.distributed as dist


def main():
    loss_dict = {"loss_cls": torch.tensor(0.5), "loss_box_reg": torch.tensor(0.1), "loss_mask": torch.tensor(9.0)}
    if dist.get_rank() == 1:
        loss_dict = {"loss_mask": torch.tensor(8.0), "loss_cls": torch.tensor(0.4), "loss_box_reg": torch.tensor(0.3)}
    held = {k: v.clone() for k, v in loss_dict.items()}
    world_size = dist.get_world_size()
    for loss in loss_dict.values():
        dist.all_reduce(loss.div_(world_size))
    return held, loss_dict
