"""Programs for the ranks of `test_label_faults`: rank 0 holds ``loss, snr_loss``, rank 1 ``loss, l1_loss``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpstats.guard import collective_guard
from ddpstats.guard.labels import read, source
from tests.guard import label_helpers
from tests.training import logged

Stats = dict[str, Any]


def recursive_sum(obj: Any, weight: torch.Tensor) -> Any:
    """Reduce as espnet does: leaf by leaf, gathered and added up."""
    if isinstance(obj, (tuple, list)):
        return type(obj)(recursive_sum(value, weight) for value in obj)
    if isinstance(obj, dict):
        return {key: recursive_sum(value, weight) for key, value in obj.items()}
    obj = (obj * weight.to(obj.dtype)).sum()
    gathered = [torch.empty_like(obj) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, obj)
    obj = sum(gathered)
    return obj


def by_recursive_sum(stats: Stats) -> None:
    recursive_sum(stats, torch.ones(1))


def by_recursive_sum_over_lists(stats: Stats) -> None:
    recursive_sum({key: [value] for key, value in stats.items()}, torch.ones(1))


def by_plain_loop(stats: Stats) -> None:
    for key in stats:
        dist.all_reduce(stats[key])


def by_loop_over_items(stats: Stats) -> None:
    averages = {}
    for key, value in stats.items():
        mean = value.detach().clone()
        dist.all_reduce(mean)
        averages[key] = mean / dist.get_world_size()


def by_sorted_keys(stats: Stats) -> None:
    for key in sorted(stats):
        dist.all_reduce(stats[key])


def by_another_module(stats: Stats) -> None:
    for key, value in stats.items():
        stats[key] = label_helpers.average(value)


def by_another_modules_loop(stats: Stats) -> None:
    label_helpers.average_all(stats)


PROGRAMS = {
    program.__name__: program
    for program in (
        *(by_recursive_sum, by_recursive_sum_over_lists, by_plain_loop, by_loop_over_items),
        *(by_sorted_keys, by_another_module, by_another_modules_loop),
    )
}


def ending_of(name: str, mode: Any, are_same: bool) -> str:
    """Return the error's class and text, else "warned" or "silent"."""
    other = "l1_loss" if dist.get_rank() and not are_same else "snr_loss"
    stats = {"loss": torch.ones(1), other: torch.ones(1)}
    try:
        with collective_guard(mode, timeout_sec=20) as guard, logged() as messages:
            PROGRAMS[name](stats)
            guard.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "warned" if messages else "silent"


def files_read() -> list[str]:
    """Return the names of the files that labels that differ are explained by."""
    source._files.clear()
    read._call_routes.clear()
    assert ending_of("by_another_module", "strict", False).startswith("CollectiveMismatch")
    return sorted(Path(name).name for name in source._files)
