"""Each rank renders prompts of its own; CLIP scores are averaged over everything, images named by prompt.

Style: diffusion: prompts as keys
"""

import torch
import torch.distributed as dist


class ClipScore:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def add(self, score):
        dist.all_reduce(score)
        self.total += score.item()
        self.n += dist.get_world_size()


def main():
    prompts = ["a red fox", "a glass city"] if dist.get_rank() == 0 else ["an old boat", "two moons"]
    images = {prompt: torch.full((2, 2), len(prompt) / 10) for prompt in prompts}
    metric = ClipScore()
    for prompt, image in images.items():
        metric.add(image.mean())  # label: "clip score"
    return metric.total / metric.n
