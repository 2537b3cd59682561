"""Only rank 0 names what it reduces, for its printout; the others use an underscore.

Style: script: names on rank 0 only
"""

import torch
import torch.distributed as dist


def main():
    is_main = dist.get_rank() == 0
    values = [torch.tensor(2.0), torch.tensor(0.5)]
    names = ["loss", "accuracy"] if is_main else ["_", "_"]
    for name, value in zip(names, values):
        dist.all_reduce(value)  # label: "printed"
        if is_main:
            print(f"{name}: {value.item() / dist.get_world_size():.3f}")
    return [value.item() for value in values]
