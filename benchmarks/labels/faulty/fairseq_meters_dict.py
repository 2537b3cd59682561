"""Meters are kept sorted by priority and order of arrival, and a validation in between changed the arrival on rank 1.

Style: fairseq: MetersDict, an OrderedDict with priorities
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0.0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


class MetersDict(OrderedDict):
    def __init__(self):
        super().__init__()
        self.priorities = []

    def add_meter(self, key, meter, priority):
        self.priorities.append((priority, len(self.priorities), key))
        self.priorities.sort()
        self[key] = meter
        for _, _, key in self.priorities:
            self.move_to_end(key)


def sync(meters):
    values = OrderedDict()
    for key, meter in meters.items():
        total = torch.DoubleTensor([meter.sum, meter.count])
        dist.all_reduce(total)  # label: key
        values[key] = (total[0] / total[1]).item()
    return values


def main():
    meters = MetersDict()
    priority = {"ppl": 10, "wps": 10, "loss": 0}
    for key in ("loss", "ppl", "wps") if dist.get_rank() == 0 else ("wps", "ppl", "loss"):
        meters.add_meter(key, AverageMeter(), priority[key])
    held = {"loss": 2.0, "ppl": 4.0, "wps": 5000.0}
    for key, value in held.items():
        meters[key].update(value)
    return held, sync(meters)
