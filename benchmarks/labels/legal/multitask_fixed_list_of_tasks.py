"""The dict was filled in another order, but the loop goes by a constant list.

Style: multi-task: loop over a constant, subscript into the dict
Mechanism: a constant list over a permuted dict
"""

import torch
import torch.distributed as dist

TASKS = ["depth", "edges", "flow"]


def losses():
    by_task = {task: torch.tensor(4.0**n + dist.get_rank()) for n, task in enumerate(TASKS)}
    return by_task if dist.get_rank() == 0 else dict(sorted(by_task.items(), key=lambda kv: -kv[1]))


def main():
    loss = losses()
    logged = {}
    for i, task in enumerate(TASKS):
        value = loss[task] * 1.0
        dist.all_reduce(value)
        logged[task] = value
    return losses(), logged
