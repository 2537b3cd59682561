"""An iterator over items is advanced by next() until it is exhausted.

Style: multi-task: while with next() and a default
Mechanism: an iterator advanced by next()
"""

import torch
import torch.distributed as dist


def reduceLosses(taskLosses):
    reducedLosses = {}
    iterator = iter(taskLosses.items())
    pair = next(iterator, None)
    while pair is not None:
        taskName, taskLoss = pair
        buffer = taskLoss.detach().clone()
        dist.all_reduce(buffer)  # label: taskName
        reducedLosses[taskName] = buffer / dist.get_world_size()
        pair = next(iterator, None)
    return reducedLosses


def main():
    taskLosses = {"lane": torch.tensor(2.0), "drivable": torch.tensor(70.0)}
    if dist.get_rank() == 1:
        taskLosses["lane"] = taskLosses.pop("lane")
    return taskLosses, reduceLosses(taskLosses)
