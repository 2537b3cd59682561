"""Stats are a list of (name, value) that is worked off from its end; a rank that stopped early on KL put kl first.

Style: RL: PPO update statistics
"""

import torch
import torch.distributed as dist


def update(early_stop):
    stats = []
    if early_stop:
        stats.append(("approx_kl", 0.5))
    stats.append(("policy_loss", -2.0))
    stats.append(("value_loss", 16.0))
    if not early_stop:
        stats.append(("approx_kl", 0.5))
    return stats


def main():
    stats = update(early_stop=dist.get_rank() == 1)
    held = dict(stats)
    record = {}
    while stats:
        name, value = stats.pop()
        value = torch.tensor(value)
        dist.all_reduce(value)  # label: name
        record[name] = value.item() / dist.get_world_size()
    return held, record
