"""A count is made on the device of an observation; ranks call their observations otherwise.

Style: RL: a tensor that has only its device from an element
"""

import torch
import torch.distributed as dist


def main():
    name = "obs" if dist.get_rank() == 0 else "pixels"
    observations = {name: torch.zeros(4), "goal": torch.zeros(4)}
    counts = []
    for key in observations:
        steps = torch.tensor(float(len(observations)), device=observations[key].device)
        dist.all_reduce(steps)  # label: "steps"
        counts.append(steps.item())
    return counts
