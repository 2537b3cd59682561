"""reduce_dict as it should be: the names are sorted and the values stacked.

Style: detectron2: comm.reduce_dict
Mechanism: sorted keys, stacked into one tensor
"""

import torch
import torch.distributed as dist


def reduce_dict(input_dict, average=True):
    names = []
    values = []
    for k in sorted(input_dict.keys()):
        names.append(k)
        values.append(input_dict[k])
    values = torch.stack(values, dim=0)
    dist.reduce(values, dst=0)
    if dist.get_rank() == 0 and average:
        values /= dist.get_world_size()
    return dict(zip(names, values))


def main():
    losses = {"loss_cls": torch.tensor(1.0), "loss_box_reg": torch.tensor(8.0)}
    if dist.get_rank() == 1:
        losses = dict(reversed(losses.items()))
    reduced = reduce_dict(losses)
    return sorted(reduced) if dist.get_rank() else (losses, reduced)
