"""The list grows by what was gathered from all ranks."""

import torch.distributed as dist


def resample(samples, wanted, mask):
    valid_samples = []
    while True:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, samples)
        valid_samples.extend([s for s, good in zip(everyone, mask) if good])
        if len(valid_samples) >= wanted:
            break
