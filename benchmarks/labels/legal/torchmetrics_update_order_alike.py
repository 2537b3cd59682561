"""States are registered in one order by the class; how each rank updated them does not matter.

Style: torchmetrics: getattr over registered states
"""

import torch
import torch.distributed as dist


class StatScores:
    def __init__(self):
        self._defaults = {}
        for name in ("tp", "fp", "tn", "fn"):
            self._defaults[name] = torch.zeros(1)
            setattr(self, name, torch.zeros(1))

    def sync(self):
        for attr in self._defaults:
            dist.all_reduce(getattr(self, attr))
        return {attr: getattr(self, attr) for attr in self._defaults}


def main():
    metric = StatScores()
    held = {"tp": 3.0, "fn": 1.0} if dist.get_rank() == 0 else {"fn": 2.0, "tp": 9.0}
    for name, value in held.items():
        getattr(metric, name).add_(value)
    return {"tp": 0, "fp": 0, "tn": 0, "fn": 0} | held, metric.sync()
