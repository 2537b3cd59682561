"""Meters come to be when first updated; on rank 1 the first batch had no objects, and its order is another one.

Style: DETR: MetricLogger with SmoothedValue.synchronize_between_processes
Mechanism: objects of a dict that reduce themselves in a method
"""

from collections import defaultdict, deque

import torch
import torch.distributed as dist


class SmoothedValue:
    def __init__(self):
        self.deque = deque(maxlen=20)
        self.total = 0.0
        self.count = 0

    def update(self, value):
        self.deque.append(value)
        self.count += 1
        self.total += value

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        t = t.tolist()
        self.count = int(t[0])
        self.total = t[1]

    @property
    def global_avg(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v)

    def synchronize_between_processes(self):
        for name, meter in self.meters.items():
            meter.synchronize_between_processes()  # label: name


def main():
    logger = MetricLogger()
    if dist.get_rank() == 1:
        logger.update(loss_bbox=5.0)
    logger.update(loss_ce=0.5)
    if dist.get_rank() == 0:
        logger.update(loss_bbox=5.0)
    logger.synchronize_between_processes()
    return {"loss_ce": 0.5, "loss_bbox": 5.0}, {k: meter.global_avg for k, meter in logger.meters.items()}
