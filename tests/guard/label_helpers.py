"""Helpers of a program that reduces in another module than it loops in."""

from __future__ import annotations

import torch
import torch.distributed as dist


def average(value: torch.Tensor) -> torch.Tensor:
    """Return the mean over ranks."""
    mean = value.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def average_all(stats: dict[str, torch.Tensor]) -> None:
    """Average all values in place."""
    for value in stats.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
