"""The sampler gives each rank as many samples."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def validate(model, dataset):
    batches = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
    total_loss, num_samples = 0.0, 0
    for x in batches:
        total_loss += model(x).item()
        num_samples += len(x)
    loss = torch.tensor(total_loss / num_samples)
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
