"""Per-class counts over a fixed list of classes, the same on all ranks, whatever was seen.

Style: evaluation: per-class counts in a fixed order
"""

import torch
import torch.distributed as dist

CLASSES = ("background", "car", "person")


def main():
    seen = ["car", "car"] if dist.get_rank() == 0 else ["person", "background"]
    counts = {name: seen.count(name) for name in seen}
    reduced = {}
    for name in CLASSES:
        value = torch.tensor(counts.get(name, 0))
        dist.all_reduce(value)
        reduced[name] = value.item()
    return counts, reduced
