"""States are reduced by setattr over _reductions, whose order follows when add_state was called.

Style: torchmetrics: Metric._sync_dist with setattr
Mechanism: getattr and setattr over names
"""

import torch
import torch.distributed as dist


class Metric:
    def __init__(self):
        self._reductions = {}

    def add_state(self, name, value, fx=torch.sum):
        setattr(self, name, value)
        self._reductions[name] = fx

    def sync(self):
        for attr, fx in self._reductions.items():
            gathered = getattr(self, attr).clone()
            dist.all_reduce(gathered)
            setattr(self, attr, gathered)


def main():
    metric = Metric()
    values = {"correct": torch.tensor(3.0), "total": torch.tensor(100.0)}
    for name in ["correct", "total"] if dist.get_rank() == 0 else ["total", "correct"]:
        metric.add_state(name, values[name])
    metric.sync()
    return values, {name: getattr(metric, name) for name in values}
