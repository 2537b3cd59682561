"""Each rank has taken as many steps."""

import numpy as np
import torch
import torch.distributed as dist


def train(step, steps, epochs):
    for epoch in range(epochs):
        losses = []
        for _ in range(steps):
            losses.append(step())
        mean = torch.tensor(np.mean(losses))
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
