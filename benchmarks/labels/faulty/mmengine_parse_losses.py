"""log_vars are averaged in the order of the heads' losses, which rank 1 was configured with the other way round.

Style: mmengine: _parse_losses of a detector
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


class Detector:
    def __init__(self, heads):
        self.heads = heads

    def loss(self):
        losses = OrderedDict()
        for head in self.heads:
            losses.update(head())
        return losses

    def _parse_losses(self, losses):
        log_vars = OrderedDict()
        for loss_name, loss_value in losses.items():
            if isinstance(loss_value, torch.Tensor):
                log_vars[loss_name] = loss_value.mean()
            else:
                log_vars[loss_name] = sum(_loss.mean() for _loss in loss_value)
        loss = sum(value for key, value in log_vars.items() if "loss" in key)
        log_vars["loss"] = loss
        for loss_name, loss_value in log_vars.items():
            loss_value = loss_value.data.clone()
            dist.all_reduce(loss_value.div_(dist.get_world_size()))  # label: loss_name
            log_vars[loss_name] = loss_value.item()
        return loss, log_vars


def rpn_head():
    return {"loss_rpn_cls": [torch.tensor([1.0]), torch.tensor([2.0])]}


def bbox_head():
    return {"loss_cls": torch.tensor([40.0]), "acc": torch.tensor([88.0])}


def main():
    heads = [rpn_head, bbox_head] if dist.get_rank() == 0 else [bbox_head, rpn_head]
    model = Detector(heads)
    _, log_vars = model._parse_losses(model.loss())
    return {"loss_rpn_cls": 3.0, "loss_cls": 40.0, "acc": 88.0, "loss": 43.0}, log_vars
