"""results_dict is a property that zips keys with values, and the task of rank 1 lists them in another order.

Style: YOLO: results_dict property
"""

import torch
import torch.distributed as dist


class DetMetrics:
    def __init__(self, keys):
        self._keys = keys
        self.box = {"metrics/precision(B)": 0.5, "metrics/recall(B)": 0.25, "fitness": 16.0}

    @property
    def keys(self):
        return self._keys

    def mean_results(self):
        return [self.box[k] for k in self.keys]

    @property
    def results_dict(self):
        return dict(zip(self.keys, self.mean_results()))


class Validator:
    def __init__(self, metrics):
        self.metrics = metrics

    def __call__(self):
        stats = self.metrics.results_dict
        for k, v in stats.items():
            t = torch.tensor(v)
            dist.all_reduce(t)  # label: k
            stats[k] = round(t.item() / dist.get_world_size(), 5)
        return stats


def main():
    keys = ["metrics/precision(B)", "metrics/recall(B)", "fitness"]
    if dist.get_rank() == 1:
        keys = [keys[2]] + keys[:2]
    metrics = DetMetrics(keys)
    return metrics.results_dict, Validator(metrics)()
