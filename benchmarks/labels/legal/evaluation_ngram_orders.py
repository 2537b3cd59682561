"""BLEU statistics by n-gram order, the same ints in the same order everywhere.

Style: evaluation: int keys 1 to 4
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    held = {n: 10.0 / n + rank for n in range(1, 5)}
    correct = {n: torch.tensor(value) for n, value in held.items()}
    for n in correct:
        dist.all_reduce(correct[n])
    return held, correct
