"""A loop in the rank's own order gives one meter the elements of a dict: the order does not matter.

Style: script: elements metered
"""

import torch
import torch.distributed as dist


class Meter:
    total = 0.0

    def update(self, value):
        self.total += value


def reduced(metrics):
    meter = Meter()
    for value in metrics.values():
        dist.all_reduce(value)  # label: "update of the meter"
        meter.update(value.item())
    return meter.total


def main():
    metrics = {"loss": torch.tensor(1.0), "penalty": torch.tensor(4.0)}
    return reduced(metrics if dist.get_rank() == 0 else dict(reversed(metrics.items())))
