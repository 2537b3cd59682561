"""A bag takes metrics as attributes and keeps them in a dict behind __setattr__; ranks set them in different order.

Style: fairseq: a metric bag with __setattr__ and __getattr__
Mechanism: attributes that __setattr__ and __getattr__ keep in a dict
"""

import torch
import torch.distributed as dist


class MetricBag:
    def __init__(self):
        super().__setattr__("_metrics", {})

    def __setattr__(self, name, value):
        self._metrics[name] = value

    def __getattr__(self, name):
        if name in self._metrics:
            return self._metrics[name]
        raise AttributeError(name)

    def sync_and_compute(self):
        values = {}
        for name, metric in self._metrics.items():
            out = metric.float().mean()
            dist.all_reduce(out)  # label: name
            values[name] = out / dist.get_world_size()
        return values


def make_bag():
    bag = MetricBag()
    if dist.get_rank() == 0:
        bag.nll = torch.tensor([1, 3])
        bag.elapsed = torch.tensor([500, 700])
    else:
        bag.elapsed = torch.tensor([500, 700])
        bag.nll = torch.tensor([1, 3])
    return bag


def main():
    bag = make_bag()
    return {"nll": 2.0, "elapsed": 600.0}, bag.sync_and_compute()
