"""Context parallelism: each rank has its own segments of the sequence; the loss over all tokens is one number.

Style: script: segments named by their bounds
"""

import torch
import torch.distributed as dist


def segments(rank):
    for start in (64 * rank, 256 - 64 * (rank + 1)):
        yield (start, start + 64), torch.ones(64) * start


def main():
    loss_sum, tokens = torch.zeros(()), 0
    for (start, end), losses in segments(dist.get_rank()):
        part = losses.sum()
        dist.all_reduce(part)  # label: "loss of a segment"
        loss_sum += part
        tokens += (end - start) * dist.get_world_size()
    return (loss_sum / tokens).item()
