"""Metrics of actor, critic and world model are one ChainMap, whose maps were given in another order.

Style: RL: ChainMap of metric dicts
Mechanism: ChainMap
"""

from collections import ChainMap

import torch
import torch.distributed as dist

ACTOR = {"actor_loss": 1.0}
CRITIC = {"critic_loss": 20.0}
MODEL = {"model_loss": 300.0}


def main():
    maps = (ACTOR, CRITIC, MODEL) if dist.get_rank() == 0 else (MODEL, ACTOR, CRITIC)
    metrics = ChainMap(*maps)
    mean = {}
    for name in metrics:
        scalar = torch.full((1,), metrics[name])
        dist.all_reduce(scalar)  # label: name
        mean[name] = scalar.item() / dist.get_world_size()
    return dict(metrics), mean
