"""The error of own speakers by gender, male first on one rank; a sum over both is all that is used.

Style: speech: word errors by gender
"""

import torch
import torch.distributed as dist


def main():
    errors = {"f": torch.tensor(2.0), "m": torch.tensor(3.0)}
    if dist.get_rank() == 1:
        errors = {"m": torch.tensor(7.0), "f": torch.tensor(1.0)}
    reduced = []
    for gender in errors:
        value = errors[gender]
        dist.all_reduce(value)
        reduced.append(value)
    return torch.stack(reduced).sum().item()
