"""Counts are kept per class name in a defaultdict, in the order in which classes were met.

Style: evaluation: per-class true positives
"""

from collections import defaultdict

import torch
import torch.distributed as dist

IMAGES = {0: ["car", "car", "person"], 1: ["person", "car", "car"]}


def main():
    images = IMAGES[min(dist.get_rank(), 1)]
    tp = defaultdict(lambda: torch.zeros(1, dtype=torch.int64))
    for name in images:
        tp[name] += 1
    for cls in tp.keys():
        dist.all_reduce(tp[cls])  # label: cls
    return {name: images.count(name) for name in images}, tp
