"""The inception score is over splits, each rank has those with numbers of its own.

Style: GAN: splits by number
"""

import torch
import torch.distributed as dist


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    scores = {split: torch.tensor(5.0 + split) for split in range(rank, 5 * world, world)}
    values = []
    for split in scores:
        score = scores[split].clone()
        dist.all_reduce(score)  # label: "score of a split"
        values.append(score / world)
    return torch.stack(values).mean().item()
