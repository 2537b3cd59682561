"""reduce_dict without its sorted(): the values are stacked in each rank's own order and summed as one vector.

Style: DETR: utils.reduce_dict
Mechanism: values stacked into one tensor
Cannot be seen: the values are stacked into one tensor, and names stand beside it only
"""

import torch
import torch.distributed as dist


def reduce_dict(input_dict, average=True):
    names = []
    values = []
    for k in input_dict:
        names.append(k)
        values.append(input_dict[k])
    values = torch.stack(values, dim=0)
    dist.all_reduce(values)  # label: ",".join(names)
    if average:
        values /= dist.get_world_size()
    return dict(zip(names, values))


def criterion(losses):
    table = {"labels": ("loss_ce", 1.0), "boxes": ("loss_bbox", 10.0), "cardinality": ("cardinality_error", 100.0)}
    return {table[loss][0]: torch.tensor(table[loss][1]) for loss in losses}


def main():
    order = ["labels", "boxes", "cardinality"]
    if dist.get_rank() == 1:
        order = ["labels", "cardinality", "boxes"]
    return criterion(order), reduce_dict(criterion(order))
