"""Rates are put into an OrderedDict as update_summary gets them, after a reduction of each item's tensor.

Style: timm: summary rows with nested OrderedDict([('train', ...), ('eval', ...)])
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


def train_one_epoch():
    return OrderedDict([("loss", torch.tensor(4.0))])


def validate():
    return OrderedDict([("loss", torch.tensor(3.0)), ("top5", torch.tensor(90.0))])


def run_epoch(validate_first):
    if validate_first:
        return OrderedDict([("eval", validate()), ("train", train_one_epoch())])
    return OrderedDict([("train", train_one_epoch()), ("eval", validate())])


def update_summary(metrics):
    rowd = OrderedDict(epoch=0)
    for split in metrics:
        rowd.update([(split + "_" + k, distribute(v)) for k, v in metrics[split].items()])
    return rowd


def distribute(tensor):
    out = tensor.clone()
    dist.all_reduce(out)
    return out.item() / dist.get_world_size()


def main():
    metrics = run_epoch(validate_first=dist.get_rank() == 1)
    rowd = update_summary(metrics)
    del rowd["epoch"]
    return {"train_loss": 4.0, "eval_loss": 3.0, "eval_top5": 90.0}, rowd
