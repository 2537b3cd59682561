"""The solver's stats are put together in the order in which losses were computed, and on rank 1 that is another one.

Style: espnet: stats of a model with several solvers, plain loop
"""

import torch
import torch.distributed as dist


def collect(criteria):
    stats = {}
    for name, value in criteria:
        stats[name] = torch.tensor(value)
    return stats


def main():
    criteria = [("snr_loss", -12.5), ("mse_loss", 0.5), ("stft_loss", 2.25)]
    if dist.get_rank() == 1:
        criteria.reverse()
    stats = collect(criteria)
    for key in stats:
        dist.all_reduce(stats[key])  # label: key
        stats[key] /= dist.get_world_size()
    return collect(criteria), stats
