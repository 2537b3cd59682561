"""Results are objects in a dict subclass, keyed by hook and name; a rank's first hook was another one.

Style: Lightning: a result collection of metric objects
"""

import torch
import torch.distributed as dist


class _ResultMetric:
    def __init__(self, fx, name):
        self.fx, self.name = fx, name
        self.value = torch.tensor(0.0)
        self.cumulated_batch_size = torch.tensor(0)

    def update(self, value, batch_size):
        self.value += value * batch_size
        self.cumulated_batch_size += batch_size

    def compute(self):
        value = self.value.clone()
        dist.all_reduce(value)
        return value


class _ResultCollection(dict):
    def log(self, fx, name, value, batch_size=1):
        key = f"{fx}.{name}"
        if key not in self:
            self[key] = _ResultMetric(fx, name)
        self[key].update(value, batch_size)

    def epoch_metrics(self):
        metrics = {}
        for key, result_metric in self.items():
            value = result_metric.compute()  # label: key
            metrics[result_metric.name] = value
        return metrics


def main():
    results = _ResultCollection()
    calls = [("training_step", "loss", 1.5), ("on_before_optimizer_step", "grad_norm", 64.0)]
    if dist.get_rank() == 1:
        calls = calls[1:] + calls[:1]
    for fx, name, value in calls:
        results.log(fx, name, value)
    return {name: value for _, name, value in calls}, results.epoch_metrics()
