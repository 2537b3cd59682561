"""Captures that meet a difficult file system, group or module: what `test_publish` runs on the ranks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import NaNCapture
from ddpstats.capture import CaptureVerdict
from ddpstats.capture.bundle import BundleWriter, PartSource, write_part
from ddpstats.testing import die
from tests.capture.capture_runs import captured, make_model, noisy_step, planted, sharded_model
from tests.training import batch_of, rank

BOOM = ValueError("boom")


def bad_step(dirpath: Path | str, **options: Any) -> CaptureVerdict:
    """Train one step that is not finite, on every rank of the group."""
    batches = planted({(0, rank(), 0): torch.nan})
    return captured(str(dirpath), make_model(), 1, batch_of=batches, loss_of=noisy_step, **options).verdicts[0]


def subgroup(dirpath: str) -> CaptureVerdict | None:
    """Capture on rank 1 alone, in a group of one rank."""
    group = dist.new_group([1])
    return bad_step(dirpath, group=group) if rank() == 1 else None


def lowest_rank_cannot(dirpath: str, what: str, **options: Any) -> CaptureVerdict:
    """Rank 0 may not "look" at files of the bundle, as with another user's directory, or "make" a directory."""
    exists = Path.exists

    def refuse(path: Path, *_: object) -> Any:
        if what == "make" or path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return exists(path)

    with pytest.MonkeyPatch.context() as patch:
        if rank() == 0 and what == "make":
            patch.setattr("ddpstats.capture.bundle.new_directory", refuse)
        elif rank() == 0:
            patch.setattr(Path, "exists", refuse)
        return bad_step(dirpath, **options)


@contextmanager
def writing(
    on_rank: int, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> Iterator[pytest.MonkeyPatch]:
    """Call ``before`` and ``after`` around the writing of each file on one rank."""

    def write(*args: Any) -> Any:
        before()
        written = write_part(*args)
        after()
        return written

    with pytest.MonkeyPatch.context() as patch:
        if rank() == on_rank:
            patch.setattr("ddpstats.capture.bundle.write_part", write)
        yield patch


def dies_while_writing(dirpath: str, dead: int) -> CaptureVerdict:
    """Kill a rank when it has written its part: rank 0 before the parameters."""
    with writing(dead, after=die):
        return bad_step(dirpath)


def dies_before_the_manifest(dirpath: str) -> CaptureVerdict:
    """Rank 0 is killed when all parts are written, and it alone was to write the manifest."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 0:
            patch.setattr("ddpstats.capture.bundle.close_bundle", lambda *_, **named: die())
        return bad_step(dirpath)


def slow_disk(dirpath: str) -> CaptureVerdict:
    """On rank 1 each file takes longer than the timeout of a collective."""
    with writing(1, before=lambda: time.sleep(4)) as patch:
        patch.setenv("DDPSTATS_TIMEOUT_SEC", "3")
        return bad_step(dirpath)


def disk_that_never_answers(dirpath: str) -> CaptureVerdict:
    """On rank 1 a file is never written to its end."""
    never = threading.Event()
    with writing(1, before=lambda: never.wait(600)) as patch:
        patch.setattr("ddpstats.capture.bundle._MAX_SEC", 2.0)
        patch.setattr("ddpstats.capture.bundle._ROUND_SEC", 0.5)
        verdict = bad_step(dirpath, on_nonfinite="continue")
    never.set()
    return verdict


@contextmanager
def source_of(dirpath: Path | str, model: torch.nn.Module) -> Iterator[tuple[PartSource, Any]]:
    """Yield what a capture has of a step that raised, and its peers."""
    optimizer = torch.optim.Adam(model.parameters())
    with NaNCapture(dirpath, model=model, optimizer=optimizer) as capture:
        with capture.micro_batch(batch_of(0)):
            pass
        yield capture._source, capture._channel


def sharded_raise(dirpath: str) -> str:
    """Rank 1 writes alone under FSDP2, and rank 0 does not come to gather its parameters."""
    model = sharded_model()
    if rank() == 0:
        return ""
    with source_of(dirpath, model) as (source, peers):
        finding = CaptureVerdict(0, culprit_ranks=(1,), message="rank 1 raised")
        writer = BundleWriter(Path(dirpath), 3, None, None, peers, source, finding)
        return writer.write_alone(BOOM, lambda _: None)
