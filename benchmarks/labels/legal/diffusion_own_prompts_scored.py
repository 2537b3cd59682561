"""CLIP scores of the rank's own prompts, by prompt; a running mean object takes them.

Style: diffusion: scores by prompt
"""

import torch
import torch.distributed as dist


class RunningMean:
    def __init__(self):
        self.values = []

    def __call__(self, value):
        self.values.append(float(value))
        return sum(self.values) / len(self.values)


def score(prompt):
    return torch.tensor(float(len(prompt)))


def main():
    prompts = ["a cat", "a dog on a sofa", "a red car"]
    mine = prompts[:2] if dist.get_rank() == 0 else prompts[1:]
    mean = RunningMean()
    for prompt in mine:
        s = score(prompt)
        dist.all_reduce(s)  # label: "clip"
        clip = mean(s)
    return clip
