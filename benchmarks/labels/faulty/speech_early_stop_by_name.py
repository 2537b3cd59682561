"""A metric that got worse stops training; which metric is reported by the reduced values' own table.

Style: speech: patience by metric
"""

import torch
import torch.distributed as dist


def main():
    metrics = {"cer": torch.tensor(4.0), "loss": torch.tensor(70.0)}
    if dist.get_rank() == 1:
        metrics = dict(reversed(metrics.items()))
    history = {}
    for name, value in metrics.items():
        mean = value / dist.get_world_size()
        dist.all_reduce(mean)
        if mean > 1000:
            break
        history.setdefault(name, []).append(mean.item())
    return metrics, {name: values[-1] for name, values in history.items()}
