"""The reduced losses are made by a dict comprehension over tasks that each rank met in an order of its own.

Style: multi-task: dict comprehension over task losses
"""

import torch
import torch.distributed as dist


def reduce_mean(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt)
    return rt / dist.get_world_size()


def losses_of(batches):
    return {task: torch.tensor(loss) for task, loss in batches}


def main():
    batches = [("depth", 2.0), ("normals", 30.0), ("segmentation", 400.0)]
    if dist.get_rank() == 1:
        batches = [batches[2], batches[0], batches[1]]
    task_losses = losses_of(batches)
    reduced = {task: reduce_mean(loss) for task, loss in task_losses.items()}
    return losses_of(batches), reduced
