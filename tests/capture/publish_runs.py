"""What runs on the ranks of `test_publish`: captures that meet a file system, a group or a module that is difficult."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpstats import NaNCapture
from ddpstats.capture import CaptureVerdict
from ddpstats.capture._bundle import bundle_name
from ddpstats.capture._publish import AloneBundle
from ddpstats.testing import die
from tests.capture.capture_runs import batch_of, make_model, noisy_step


def publish_alone(
    directory: Path,
    source: Any,
    error: Exception,
    step: int,
    peers: Any,
    announce: Callable[[Path | None], None] | None = None,
    **limits: Any,
) -> str:
    """What `NaNCapture` does where a rank raises; ``announce`` takes the place of telling the peers."""
    part = AloneBundle(directory, source, error, step, peers, **limits)
    part.write()
    if announce is not None:
        announce(part.directory)
    return part.finish()


def bad_step(dirpath: Path | str, **options: Any) -> CaptureVerdict:
    """One step that is not finite, on every rank of the group."""
    model = make_model()
    with NaNCapture(dirpath, model=model, **options) as capture:
        batch = batch_of(0, dist.get_rank() if dist.is_initialized() else 0, 0)
        batch["x"][0, 0] = torch.nan
        with capture.micro_batch(batch) as kept:
            kept.loss = noisy_step(model, batch)
            kept.loss.backward()  # type: ignore[no-untyped-call]
        return capture.check()


def subgroup(dirpath: str) -> CaptureVerdict | None:
    """Rank 1 is a group of its own."""
    group = dist.new_group([1])
    return bad_step(dirpath, group=group) if dist.get_rank() == 1 else None


def lowest_cannot_look(dirpath: str) -> CaptureVerdict:
    """Rank 0 may not look at files of the bundle, as with another user's directory."""
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.suffix == ".pt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return exists(path)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(Path, "exists", refuse)
        return bad_step(dirpath, on_nonfinite="skip")


def lowest_cannot_make(dirpath: str) -> CaptureVerdict:
    """Rank 0 may not make a directory; the others could."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("ddpstats.capture._publish.new_directory", _refuse)
        return bad_step(dirpath, on_nonfinite="continue")


def _refuse(*_: object) -> Path:
    raise PermissionError(errno.EACCES, "Permission denied")


def dies_before_the_directory(dirpath: str) -> CaptureVerdict:
    """Rank 1 is killed before it learns where the bundle is."""
    publish: Any = importlib.import_module("ddpstats.capture._publish")
    if dist.get_rank() == 1:
        publish.gather_trees = lambda *_, **__: die()
    return bad_step(dirpath)


def name_taken(dirpath: str) -> CaptureVerdict:
    """Another job has a bundle of this step for every second of the next minutes."""
    if dist.get_rank() == 0:
        for second in range(200):
            when = datetime.now(timezone.utc) + timedelta(seconds=second)
            Path(dirpath, bundle_name(0, when)).mkdir(exist_ok=True)
    dist.barrier()
    return bad_step(dirpath)


def all_raise(dirpath: str) -> str:
    """Both ranks raise in the same second of the same step, and write without one another."""
    model = make_model()
    with NaNCapture(dirpath, model=model) as capture:
        with capture.micro_batch(batch_of(0, dist.get_rank(), 0)) as kept:
            noisy_step(model, kept.batch)
        path = Path(dirpath) / bundle_name(0, datetime(2026, 1, 2, tzinfo=timezone.utc), dist.get_rank())
        return publish_alone(path, capture._source, ValueError("label 17 of 3"), 0, capture._peers)


def sharded_raise(dirpath: str) -> str:
    """FSDP2: rank 1 writes alone, and rank 0 does not come to gather its parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if dist.get_rank() == 0:
        return ""
    with NaNCapture(dirpath, model=model) as capture:
        with capture.micro_batch(torch.ones(4, 6)):
            pass
        path = Path(dirpath) / bundle_name(0, datetime(2026, 1, 2, tzinfo=timezone.utc), 1)
        return publish_alone(path, capture._source, ValueError("boom"), 0, capture._peers)
