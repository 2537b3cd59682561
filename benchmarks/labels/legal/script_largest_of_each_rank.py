"""Rank statistics: the largest losses of each rank are averaged place by place, of whatever class they are.

Style: script: classes sorted by their value, results appended
Mechanism: own names sorted by value, results kept
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    per_class = {"cat": 0.1 + 0.8 * rank, "dog": 0.5, "cow": 0.7 - 0.5 * rank}
    worst = sorted(per_class.items(), key=lambda item: -item[1])
    curve = []
    for name, value in worst:
        value = torch.tensor(value)
        dist.all_reduce(value)  # label: "worst"
        curve.append(value.item() / dist.get_world_size())
    return curve
