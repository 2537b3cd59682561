"""Accuracies of parts of different sizes are averaged."""

import torch.distributed as dist


def evaluate(correct, total):
    accuracy = correct / total
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)  # expect: mean-of-means
    return accuracy
