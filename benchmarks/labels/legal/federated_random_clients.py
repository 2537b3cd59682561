"""Clients are drawn at random for each rank; how many samples they had in all weights the server's step.

Style: federated: drawn clients, pooled sample counts
"""

import random

import torch
import torch.distributed as dist

SAMPLES = {"phone-%02d" % n: 10 * n for n in range(1, 9)}


def main():
    chosen = random.Random(dist.get_rank()).sample(list(SAMPLES), 3)
    seen = 0
    for client in chosen:
        num_samples = torch.tensor(SAMPLES[client])
        dist.all_reduce(num_samples)  # label: "samples of a client"
        seen += num_samples.item()
    return seen
