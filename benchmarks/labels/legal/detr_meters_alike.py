"""Meters in the same order; a rank that saw no batch has them all the same, with count zero.

Style: DETR: MetricLogger over meters that were added at the start
"""

import torch
import torch.distributed as dist


class SmoothedValue:
    def __init__(self):
        self.total = 0.0
        self.count = 0

    def update(self, value):
        self.count += 1
        self.total += value

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = int(t[0].item()), t[1].item()


class MetricLogger:
    def __init__(self, *names):
        self.meters = {name: SmoothedValue() for name in names}

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()


def main():
    logger = MetricLogger("loss", "class_error")
    if dist.get_rank() == 0:
        logger.meters["class_error"].update(40.0)
        logger.meters["loss"].update(2.0)
    logger.synchronize_between_processes()
    return {k: meter.total / meter.count for k, meter in logger.meters.items()}
