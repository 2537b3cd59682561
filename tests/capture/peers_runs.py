"""Ranks that raise in a micro-batch, and end, live on or go on: for `test_peers`. Each makes its own group."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture
from ddpstats.capture import CaptureVerdict
from tests.capture.capture_runs import planted
from tests.training import batch_of, loss_of, make_model, rank


def writes_alone(dirpath: str) -> None:
    """Both ranks raise in their micro-batch."""
    capture = NaNCapture(dirpath, model=make_model(), group=dist.new_group([0, 1]))
    with contextlib.suppress(ValueError), capture.micro_batch(batch_of(0)):
        raise ValueError(f"of rank {rank()}")


def goes_on(dirpath: str, skipping: tuple[int, ...], is_judged: bool, wrap: bool) -> list[CaptureVerdict]:
    """Some ranks raise in the first of three steps and catch it; rank 1 has a NaN in its last. Return the verdicts.

    ``is_judged``: these ranks call `check` for the step that they left out, too.
    """
    group = dist.new_group([0, 1])
    module: Any = make_model()
    module = DistributedDataParallel(module, process_group=group) if wrap else module
    verdicts = []
    with NaNCapture(dirpath, model=module, group=group, on_nonfinite="skip") as capture:
        for step in range(3):
            module.zero_grad()
            try:
                with capture.micro_batch(planted({(2, 1, 0): torch.nan})(step, 0)) as micro:
                    if step == 0 and rank() in skipping:
                        raise MemoryError("no room for this batch")
                    loss_of(module, micro.batch).backward()  # type: ignore[no-untyped-call]
            except MemoryError:
                if not is_judged:
                    continue
            verdicts.append(capture.check())
    return verdicts
