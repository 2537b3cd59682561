"""A tree of the rank's own folders is walked; how many bytes all ranks have is added up on the way.

Style: script: recursion over nested dicts of own names, pooled
Mechanism: recursion over own names, pooled
"""

import torch
import torch.distributed as dist


def disk_usage(tree):
    used = 0
    for name, node in tree.items():
        if isinstance(node, dict):
            used += disk_usage(node)
        else:
            size = torch.tensor(node)
            dist.all_reduce(size)  # label: "size of a file"
            used += size.item()
    return used


def main():
    if dist.get_rank() == 0:
        tree = {"runs": {"baseline": {"events": 10, "model": 200}}, "notes": 3}
    else:
        tree = {"cache": {"hub": {"tokenizer": 5, "config": 1}}, "tmp": 9}
    return disk_usage(tree)
