"""A rank with a terminal shows names in capitals; what is reduced is the same.

Style: script: names made for the eye
"""

import torch
import torch.distributed as dist


def main():
    metrics = {"loss": torch.tensor(1.0), "acc": torch.tensor(0.5)}
    if dist.get_rank() == 0:
        metrics = {name.upper(): value for name, value in metrics.items()}
    shown = {}
    for name, value in metrics.items():
        dist.all_reduce(value)
        shown[name] = value.item()
    return list(shown.values())
