"""The losses of each task are stacked, and their sum is part of a total; a rank has its tasks in an order of its own.

Style: multi-task: lists of losses per task, a total in the loop
"""

import torch
import torch.distributed as dist


def main():
    losses = {"segment": [1.0, 2.0], "detect": [3.0, 4.0]}
    tasks = sorted(losses, reverse=dist.get_rank() == 1)
    total = torch.zeros(())
    for task in tasks:
        of_task = torch.tensor(losses[task]).sum()
        dist.all_reduce(of_task)  # label: "loss of a task"
        total += of_task
    return total.item()
