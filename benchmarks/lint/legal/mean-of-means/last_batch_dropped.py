"""Sampler and loader drop the incomplete rest, so each rank has as many samples."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def main(dataset, model):
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, drop_last=True), drop_last=True)
    correct, total = torch.zeros(1), 0
    for x, y in loader:
        correct += (model(x) == y).sum()
        total += len(y)
    accuracy = correct / total
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
    return accuracy
