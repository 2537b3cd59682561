"""GRPO: rewards by the rank's own prompts; their means are averaged into one curve.

Style: RL: rewards by prompt text
"""

import statistics

import torch
import torch.distributed as dist


def main():
    if dist.get_rank() == 0:
        rewards = {"What is 2+2?": [1.0, 0.0], "Name a prime.": [1.0, 1.0]}
    else:
        rewards = {"Solve x^2=4.": [0.0, 0.0], "Capital of Peru?": [1.0, 0.0]}
    curve = 0.0
    for prompt, group in rewards.items():
        mean = torch.tensor(statistics.fmean(group))
        dist.all_reduce(mean)  # label: "reward of a prompt"
        curve += mean.item() / (2 * dist.get_world_size())
    return {"reward": curve}
