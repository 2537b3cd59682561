"""Observation statistics over the sorted keys of the space, the same for all ranks.

Style: RL: RunningMeanStd per observation key
"""

import torch
import torch.distributed as dist


def observe(rank):
    obs = {"pixels": torch.tensor(4.0), "joints": torch.tensor(-1.0 + rank)}
    return obs if rank == 0 else dict(reversed(obs.items()))


def main():
    obs = observe(dist.get_rank())
    mean = {key: obs[key].clone() for key in sorted(obs)}
    for key in mean:
        dist.all_reduce(mean[key])
        mean[key] /= dist.get_world_size()
    return obs, mean
