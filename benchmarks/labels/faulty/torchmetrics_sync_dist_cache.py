"""_sync_dist first collects the states into a dict; the class of rank 1's metric registers them the other way round.

Style: torchmetrics: _sync_dist with a dict of states
"""

import torch
import torch.distributed as dist


class Metric:
    def __init__(self, **states):
        self._reductions = dict.fromkeys(states, torch.sum)
        for name, default in states.items():
            setattr(self, name, torch.tensor(default))

    def _sync_dist(self):
        input_dict = {attr: getattr(self, attr) for attr in self._reductions}
        for attr, value in input_dict.items():
            synced = value.clone()
            dist.all_reduce(synced)  # label: attr
            setattr(self, attr, synced)


class Dice(Metric):
    def __init__(self):
        super().__init__(intersection=10, union=400)


class IoU(Metric):
    def __init__(self):
        super().__init__(union=400, intersection=10)


def main():
    metric = Dice() if dist.get_rank() == 0 else IoU()
    metric._sync_dist()
    return {"intersection": 10, "union": 400}, {"intersection": metric.intersection, "union": metric.union}
