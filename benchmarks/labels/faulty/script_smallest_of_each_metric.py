"""The smallest value of each metric is averaged; the dict of the metrics is in another order on one rank.

Style: script: each metric's own values sorted, results appended
"""

import torch
import torch.distributed as dist


def main():
    measured = {"l1_loss": [3.0, 1.0], "snr_loss": [20.0, 50.0]}
    if dist.get_rank() == 1:
        measured = dict(reversed(measured.items()))
    stats = {name: torch.tensor(sorted(values)[0]) for name, values in measured.items()}
    held = {name: value.item() for name, value in stats.items()}
    smallest = []
    for name, value in stats.items():
        value = value.clone()
        dist.all_reduce(value)  # label: name
        smallest.append(value.item() / dist.get_world_size())
    return held, {"l1_loss": smallest[0], "snr_loss": smallest[1]}
