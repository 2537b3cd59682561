"""A level's own loss is kept by name; what is reduced then only steers the learning rate.

Style: RL: curriculum in an own order
"""

import torch
import torch.distributed as dist


def main():
    levels = ["maze", "door", "key"]
    if dist.get_rank() == 1:
        levels = ["key", "maze", "door"]
    history, lr = {}, 1.0
    for level in levels:
        loss = torch.tensor(float(len(level)))
        history[level] = loss.item()
        dist.all_reduce(loss)
        lr *= 0.5 if loss.item() > 8 else 1.0
    return lr
