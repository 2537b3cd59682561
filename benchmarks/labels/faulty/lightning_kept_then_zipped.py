"""Values are reduced into a list, and the list is put beside the names again.

Style: Lightning: list of reduced values, zip
Mechanism: results in a list that is zipped with the names
"""

import torch
import torch.distributed as dist


def main():
    metrics = {"auc": 0.5, "perplexity": 20.0}
    if dist.get_rank() == 1:
        metrics = {"perplexity": 24.0, "auc": 0.7}
    reduced = []
    for name in metrics:
        value = torch.tensor(metrics[name])
        dist.all_reduce(value)
        reduced.append(value.item() / 2)
    return metrics, dict(zip(metrics, reduced))
