"""Programs for the ranks of `test_recording`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats.guard import collective_guard
from ddpstats.guard.record import read_records

Marks = list[list[tuple[str, tuple[int, ...]]]]


def found_first(mode: Any, directory: str) -> Marks:
    """Of each rank, the marks that its record holds before the program's first collective."""
    with collective_guard(mode, record_dir=directory):
        not_finite(f"{directory}/captures")
        ddpstats.any_rank(False)  # all have written
        found = [[(mark.kind, mark.ranks) for mark in record.marks] for record in read_records(directory)]
        ddpstats.any_rank(False)  # none leaves before all have read
    return found


def not_finite(captures: str) -> None:
    model = torch.nn.Linear(1, 1)
    with ddpstats.NaNCapture(captures, model=model) as capture:
        with capture.micro_batch(None):
            model(torch.full((1, 1), math.nan)).sum().backward()
        capture.check()


def made_again(directory: str) -> list[list[int]]:
    """This rank's numbers in each group of its record: it makes a group, and a second one that gets the same name.

    Each rank alone: between ranks torch 2.13 itself may hang there.
    """
    with collective_guard("record", record_dir=directory) as guard:
        for count in (3, 2):
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            for _ in range(count):
                dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
    assert sum(guard.counters.reasons.values()) == guard.counters.not_compared == 5
    record = next(record for record in read_records(directory) if record.rank == dist.get_rank())
    return [[event.seq for event in events] for events in record.events_by_group.values()]
