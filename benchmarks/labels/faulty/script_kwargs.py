"""Metrics are keyword arguments, and the call in each branch gives them in another order.

Style: script: **kwargs
"""

import torch
import torch.distributed as dist


def log_metrics(step, **metrics):
    line = {"step": step}
    for key, val in metrics.items():
        t = torch.tensor([val])
        dist.all_reduce(t)  # label: key
        line[key] = t.item() / dist.get_world_size()
    return line


def main():
    if dist.get_rank() == 0:
        line = log_metrics(1, train_loss=4.0, lr=0.5)
    else:
        line = log_metrics(1, lr=0.5, train_loss=4.0)
    return {"train_loss": 4.0, "lr": 0.5}, {"train_loss": line["train_loss"], "lr": line["lr"]}
