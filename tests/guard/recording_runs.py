"""What runs on the ranks of `test_recording`."""

from __future__ import annotations

import math
from typing import Any

import torch

import ddpstats
from ddpstats.guard import collective_guard
from ddpstats.guard._records import read_records

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
