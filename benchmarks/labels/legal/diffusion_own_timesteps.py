"""Every rank draws timesteps of its own, and keeps the loss by timestep; the mean goes to the log.

Style: diffusion: loss by drawn timestep
"""

import torch
import torch.distributed as dist


def main():
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.randperm(1000, generator=generator)[:4].tolist()
    by_step = {t: torch.tensor(t / 1000) for t in drawn}
    mean = 0.0
    for t, loss in by_step.items():
        loss = loss.clone()
        dist.all_reduce(loss)  # label: "loss"
        mean += loss.item() / (len(by_step) * dist.get_world_size())
    return {"loss": mean}
