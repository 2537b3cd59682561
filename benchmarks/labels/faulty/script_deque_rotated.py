"""Names wait in a deque that a rank rotated when it retried the first one.

Style: script: deque of names, dict of values
Mechanism: a deque of names
"""

from collections import deque

import torch
import torch.distributed as dist

VALUES = {"precision": 0.5, "recall": 4.0, "coverage": 32.0}


def main():
    todo = deque(VALUES)
    if dist.get_rank() == 1:
        todo.rotate(-1)
    done = {}
    while todo:
        name = todo.popleft()
        value = torch.tensor(VALUES[name])
        dist.all_reduce(value)  # label: name
        done[name] = value / dist.get_world_size()
    return VALUES, done
