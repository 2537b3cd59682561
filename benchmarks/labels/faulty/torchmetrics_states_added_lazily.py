"""A metric adds its states when it first sees what they count; the ranks saw positives and negatives first.

Style: torchmetrics: add_state and getattr in sync
"""

import torch
import torch.distributed as dist


class Metric:
    def __init__(self):
        self._reductions = {}

    def add_state(self, name, default):
        self._reductions[name] = "sum"
        setattr(self, name, default)

    def sync(self):
        for attr in self._reductions:
            dist.all_reduce(getattr(self, attr))  # label: attr


class Rates(Metric):
    def update(self, name, count):
        if name not in self._reductions:
            self.add_state(name, torch.zeros(()))
        getattr(self, name).add_(count)


def main():
    seen = [("positives", 3.0), ("negatives", 50.0)]
    if dist.get_rank() == 1:
        seen = seen[::-1]
    metric = Rates()
    for name, count in seen:
        metric.update(name, count)
    metric.sync()
    return dict(seen), {"positives": metric.positives, "negatives": metric.negatives}
