"""Metrics are keyed by a frozen dataclass of name and cut-off, built in another order on one rank.

Style: recommender: dataclass instances as keys
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Key:
    name: str
    k: int

    def __str__(self):
        return f"{self.name}@{self.k}"


def compute(keys):
    return {key: torch.tensor(key.k * (1.0 if key.name == "recall" else 7.0)) for key in keys}


def main():
    keys = [Key("recall", 10), Key("map", 10)]
    values = compute(keys if dist.get_rank() == 0 else keys[::-1])
    for key, value in values.items():
        dist.all_reduce(value)  # label: str(key)
    return {str(key): value for key, value in compute(keys).items()}, {str(k): v for k, v in values.items()}
