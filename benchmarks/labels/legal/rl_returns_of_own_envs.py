"""Each rank runs environments of its own; their returns are summed one after the other into one mean.

Style: RL: returns by environment id
"""

import torch
import torch.distributed as dist

ENVS = {0: ["CartPole-v1", "Acrobot-v1"], 1: ["Pendulum-v1", "MountainCar-v0"]}


def main():
    returns = {env: torch.tensor(float(len(env))) for env in ENVS[min(dist.get_rank(), 1)]}
    mean_return = 0.0
    for env_id, value in returns.items():
        dist.all_reduce(value)  # label: "return of an environment"
        mean_return += value.item()
    return mean_return / (len(returns) * dist.get_world_size())
