"""Numbers of instances of each rank's own images, by file name, added up into one histogram.

Style: detectron2: dataset statistics by file name
"""

import torch
import torch.distributed as dist


def annotations(rank):
    return {f"{n + 100 * rank:012d}.jpg": torch.tensor([n % 3, 1, rank]) for n in range(4)}


def main():
    histogram = torch.zeros(3, dtype=torch.int64)
    for file_name, categories in annotations(dist.get_rank()).items():
        counts = torch.bincount(categories, minlength=3)[:3]
        dist.all_reduce(counts)  # label: "instances of an image"
        histogram += counts
    return histogram.tolist()
