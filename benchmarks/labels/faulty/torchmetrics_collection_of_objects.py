"""The collection was built from a set of names in an order of its own on each rank.

Style: torchmetrics: a collection that syncs its metrics in turn
"""

import torch
import torch.distributed as dist


class MeanMetric:
    def __init__(self):
        self.value = torch.zeros(1)

    def update(self, value):
        self.value += value

    def sync(self):
        dist.all_reduce(self.value)

    def compute(self):
        return self.value / dist.get_world_size()


class MetricCollection:
    def __init__(self, names):
        self._modules = {name: MeanMetric() for name in names}

    def items(self):
        return self._modules.items()

    def update(self, **values):
        for name, value in values.items():
            self._modules[name].update(value)

    def compute(self):
        result = {}
        for name, metric in self.items():
            metric.sync()  # label: name
            result[name] = metric.compute()
        return result


def main():
    names = ("accuracy", "f1", "perplexity") if dist.get_rank() == 0 else ("perplexity", "accuracy", "f1")
    metrics = MetricCollection(names)
    metrics.update(accuracy=0.5, f1=0.25, perplexity=32.0)
    return {"accuracy": 0.5, "f1": 0.25, "perplexity": 32.0}, metrics.compute()
