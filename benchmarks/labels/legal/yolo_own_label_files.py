"""Labels are checked file by file, each rank its own files; found, missing and empty ones are counted over all.

Style: YOLO: cache_labels over own files
"""

import torch
import torch.distributed as dist


def verify(path):
    return torch.tensor([1, 0, 0]) if path.endswith("0.txt") else torch.tensor([0, 1, 0])


def main():
    rank = dist.get_rank()
    cache = {f"labels/train{rank}/{n}.txt": None for n in range(4)}
    nf, nm, ne = 0, 0, 0
    for lb_file in cache:
        counts = verify(lb_file)
        dist.all_reduce(counts)  # label: "found, missing, empty"
        cache[lb_file] = True
        nf, nm, ne = nf + counts[0].item(), nm + counts[1].item(), ne + counts[2].item()
    return nf, nm, ne
