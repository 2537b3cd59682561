"""What runs on the ranks of `test_live`."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ddpstats
from ddpstats._reduction import reduction
from ddpstats.guard import _live_notes, collective_guard
from ddpstats.guard._live import lines_of, picture_of
from ddpstats.guard._live_notes import read_notes
from tests.guard import runs

LIMIT_SEC = 60.0


def trained_and_noted(mode: str, directory: str) -> tuple[Any, str]:
    """What `runs.trained_parameters` gives, and what this rank's note says then."""
    with mock.patch.object(_live_notes, "_here", None):
        _live_notes.start(directory)
        trained = runs.trained_parameters(mode)
    return trained, str(read_notes(directory)[dist.get_rank()].event)


def waited_for(directory: str, mode: Any) -> list[str]:
    """Rank 1 looks from outside, and comes once rank 0 is seen to wait for it."""
    with mock.patch.object(_live_notes, "_here", None), mock.patch.object(reduction, "heard", None):
        notes = _live_notes.start(directory)
        reduction.heard = notes.renegotiated
        with collective_guard(mode, timeout_sec=LIMIT_SEC):
            dist.all_reduce(torch.ones(1))
            ddpstats.reduce_stats({f"{mode} {dist.get_rank()}": 1.0}, name="train")
            notes.stepped(object())
            lines = _lines_until_late(directory) if dist.get_rank() else []
            with ddpstats.label("snr"):
                dist.all_reduce(torch.ones(1))
    return lines


def _lines_until_late(directory: str) -> list[str]:
    deadline = time.monotonic() + LIMIT_SEC / 2
    while time.monotonic() < deadline:
        picture = picture_of(read_notes(directory))
        if picture.late:
            return lines_of(picture)
        time.sleep(0.05)
    return lines_of(picture)
