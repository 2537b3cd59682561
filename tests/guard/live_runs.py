"""Programs for the ranks of `test_live`."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats.guard import collective_guard
from ddpstats.guard.recording import ROUNDS
from ddpstats.guard.watch import Records, lines_of, picture_of

LIMIT_SEC = 60.0


def waited_for(directory: str, mode: Any) -> list[str]:
    """Rank 1 looks from outside, and comes once rank 0 is seen to wait for it."""
    with collective_guard(mode, timeout_sec=LIMIT_SEC, record_dir=directory) as guard:
        dist.all_reduce(torch.ones(1))
        ddpstats.reduce_stats({f"{mode} {dist.get_rank()}": 1.0}, name="train")
        guard._watching.recording.step(object())
        lines = _lines_until_late(directory) if dist.get_rank() else []
        with ddpstats.label("snr"):
            dist.all_reduce(torch.ones(1))
    return lines


def told_of(directory: str, name: str) -> list[str]:
    """Return the lines that are shown once `find_things` has run on all ranks."""
    with collective_guard("record", record_dir=directory):
        find_things(f"{directory}/captures", name)
        dist.barrier()
        lines = lines_of(picture_of(Records(directory).look()))
        dist.barrier()
    return lines


def find_things(captures: str, name: str) -> None:
    """Rank 1 stops holding a key, has a gradient that is not finite, and then other parameters than rank 0."""
    rank = dist.get_rank()
    for step in range(3 * ROUNDS):
        has_both = step < ROUNDS - 1 or rank == 0
        ddpstats.reduce_stats({"loss": 1.0, **({"<snr>": 2.0} if has_both else {})}, name=name)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with ddpstats.NaNCapture(captures, model=model) as capture:
        with capture.micro_batch(None):
            model(torch.full((1, 1), math.nan if rank else 1.0)).sum().backward()
        capture.check()
    model.zero_grad()
    with ddpstats.Sentinel(model, mode=1, digest_every_steps=1) as sentinel:
        for parameter in model.parameters() if rank else ():
            parameter.data.add_(1.0)
        model(torch.ones(1, 1)).sum().backward()
        sentinel.step()


def _lines_until_late(directory: str) -> list[str]:
    deadline, records = time.monotonic() + LIMIT_SEC / 2, Records(directory)
    while time.monotonic() < deadline:
        picture = picture_of(records.look())
        if picture.late:
            return lines_of(picture)
        time.sleep(0.05)
    return lines_of(picture)
