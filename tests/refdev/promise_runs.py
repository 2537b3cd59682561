"""Functions that `test_promises` runs on a rank: each returns what the driver counted, or the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpstats
from ddpstats import NaNCapture, Sentinel, StatsReducer, StatsWindow, StepChecks
from ddpstats._rerun.digest import digests
from ddpstats.dump import StatsDump
from ddpstats.testing import BitFlip, inject_bit_flips
from tests import training
from tests.dump import collecting
from tests.training import Hooks

from .runs import LIMIT_SEC, busy, counted, join, register


def _stats(device: str = "refdev") -> dict[str, Any]:
    values = {f"loss_{index}": torch.tensor(float(index), device=device) for index in range(4)}
    return {**values, "accuracy": torch.tensor(1.0, dtype=torch.bfloat16, device=device), "host": 1.0}


# -- statistics -------------------------------------------------------------------------------------------------------


def window_adds() -> tuple[dict[str, int], dict[str, int], float]:
    """Return what five adds to a busy device count, what their flush counts, and one of its means."""
    refdev = register()
    weight = torch.tensor(2.0, device="refdev")
    with StatsWindow() as window:
        window.add(_stats(), weight)
        window.flush()
        stats = _stats()
        with busy(refdev), counted(refdev) as adds:
            for _ in range(5):
                window.add(stats, weight)
        with counted(refdev) as flush:
            reduced = window.flush()
    return adds, flush, reduced.values["loss_3"]


def reductions() -> list[dict[str, int]]:
    """Return what a reduction counts: with new keys, and with known ones."""
    refdev = register()
    reducer, counts, stats = StatsReducer(), [], _stats()
    for _ in range(3):
        with counted(refdev) as changes:
            values = reducer(stats).values
        counts.append(changes)
        assert values == {**{f"loss_{index}": float(index) for index in range(4)}, "accuracy": 1.0, "host": 1.0}
    reducer.close()
    return counts


def reduction_is_started() -> float:
    """Start a reduction of a busy device; return a value of it."""
    refdev = register()
    reducer, stats = StatsReducer(), _stats()
    reducer(stats)
    with busy(refdev):
        pending = reducer.start(stats)
    value: float = pending.result().values["loss_2"]
    reducer.close()
    return value


def adds_on_two_streams() -> tuple[float, float]:
    """Return the mean and the weight of one key that two streams add to, the second one while it is busy."""
    refdev = register()
    second_stream = torch.Stream("refdev")
    with StatsWindow() as window:
        window.add({"loss": torch.tensor(1.0, device="refdev")}, torch.tensor(1.0, device="refdev"))
        torch.accelerator.synchronize()
        with second_stream:
            refdev.occupy(0.5)
            late = torch.tensor(1.0).to("refdev", non_blocking=True) * 7 / 3
            window.add({"loss": late}, torch.tensor(3.0, device="refdev"))
        reduced = window.flush()
    return reduced.values["loss"], reduced.weights["loss"]


def time_of_kernels() -> float:
    """Return what a window calls the time of a step that only launches kernels; they take half a second."""
    refdev = register()
    torch.ones(1, device="refdev")
    with StatsWindow() as window:
        with window.timed("step"):
            refdev.occupy(0.5)
        return float(window.flush().values["time"]["step"])


# -- checks of a step -------------------------------------------------------------------------------------------------


def waits_of_checks(dirpath: str, what: str) -> list[int]:
    """Return how often the host waits for the device in each of four checks of a step that is right."""
    refdev = join()
    model = nn.parallel.DistributedDataParallel(training.make_model().to("refdev"))
    waits: list[int] = []
    with (
        NaNCapture(dirpath, model=model) as capture,
        Sentinel(model, mode=2) as sentinel,
        ddpstats.collective_guard("step") as guard,
    ):
        checks = StepChecks(capture=capture, sentinel=sentinel, guard=guard)
        parts: dict[str, Callable[[], object]] = {
            "capture": capture.check,
            "sentinel": sentinel.step,
            "guard": guard.step,
        }
        check = parts.get(what, checks.step)

        def judge(step: int) -> bool:
            torch.accelerator.synchronize()
            with counted(refdev) as changes:
                check()
            waits.append(changes.get("synchronizations", 0))
            return True

        hooks = Hooks(capture.micro_batch, judge=judge)
        training.train(model, 4, batch_of=lambda step, micro: _batch("refdev", step), hooks=hooks)
    return waits


def _batch(device: str, step: int, dtype: torch.dtype = torch.float32) -> training.Batch:
    return {name: tensor.to(device, dtype) for name, tensor in training.batch_of(step).items()}


def dumped_on_another_stream(dirpath: str, copied_bytes: int) -> tuple[float, float]:
    """Dump a call on a second stream that is busy, and end the step on the first: the largest number, the saved one.

    ``copied_bytes``: how much may be copied to be measured beside the program.
    """
    from ddpstats.dump.record import leaves

    refdev = register()
    leaves._COPIED_BYTES = copied_bytes
    config = {"dump_path": dirpath, "task": "tensor", "async_dump": True, "tensor": {"list": ["Tensor.mul"]}}
    dump, second_stream, x = StatsDump(config), torch.Stream("refdev"), torch.ones(3, device="refdev")
    torch.accelerator.synchronize()
    with dump, second_stream:
        refdev.occupy(0.5)
        x.mul(7)
    dump.step()
    (leaf,) = collecting.data(Path(dirpath), rank="rank0")["Tensor.mul.0.forward"]["output"]
    saved = torch.load(Path(dirpath, "step0/rank0/dump_tensor_data", leaf["data_name"]))
    return leaf["Max"], saved.max().item()


# -- low precision ----------------------------------------------------------------------------------------------------


def overflow_and_nan(dtype: torch.dtype, dirpath: str) -> list[str]:
    """Return the kinds of verdicts: of steps that are right, that overflow, and that have a NaN in their batch."""
    join()
    model = nn.parallel.DistributedDataParallel(training.make_model().to("refdev"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("refdev", init_scale=256.0)
    kinds: list[str] = []
    with NaNCapture(dirpath, model=model, scaler=scaler, max_scaler_skips=2, on_nonfinite="skip") as capture:
        for case in ("right", "overflow", "right", "NaN", "NaN"):
            batch = _batch("refdev", 0)
            if case == "NaN" and dist.get_rank() == 1:
                batch["x"][0, 0] = torch.nan
            with capture.micro_batch(batch):
                with torch.autocast("refdev", dtype=dtype):
                    loss = training.loss_of(model, batch)
                if case == "overflow":
                    loss = loss * float("inf")
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            kinds.append(capture.check().kind)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return kinds


def alarms(device: str, dtype: torch.dtype, steps: int, flips: list[BitFlip]) -> list[list[int] | None]:
    """Return for each step the ranks that the sentinel blames; None without an alarm."""
    join()
    model = nn.parallel.DistributedDataParallel(training.make_model().to(device, dtype))
    blamed: list[list[int] | None] = []
    with Sentinel(model, mode=1, digest_every_steps=1) as sentinel, inject_bit_flips(model, flips) as faults:

        def judge(step: int) -> bool:
            verdict = sentinel.step()
            blamed.append(None if verdict.ok else list(verdict.culprit_ranks))
            return verdict.ok

        hooks = Hooks(judge=judge, after_step=lambda step: faults.step())
        training.train(model, steps, batch_of=lambda step, micro: _batch(device, step, dtype), hooks=hooks)
    return blamed


def digests_of_one_bit(dtype: torch.dtype) -> bool:
    """Return whether each flipped bit of a weight changes its digest, and equal bits have the digest of the CPU."""
    register()
    weight = torch.randn(33, generator=torch.Generator().manual_seed(1)).to(dtype)
    right = digests([weight.to("refdev")]).cpu()
    if not torch.equal(right, digests([weight])):
        return False
    bits = weight.element_size() * 8
    container = {16: torch.int16, 32: torch.int32}[bits]
    flipped = [weight.clone() for _ in range(bits)]
    for bit in range(bits):
        flipped[bit].view(container)[7] ^= torch.tensor(1 << bit).to(container)
    flipped_digests = digests([tensor.to("refdev") for tensor in flipped]).cpu()
    return not any(torch.equal(row, right[0]) for row in flipped_digests)


# -- two devices ------------------------------------------------------------------------------------------------------


def two_devices() -> tuple[dict[str, float], float]:
    """Return means of stats on two devices of one process, with the other one busy and not the current one."""
    refdev = register()
    assert torch.accelerator.device_count() == 2
    first, second = (torch.tensor([1.0, 3.0], device=f"refdev:{index}") for index in range(2))
    torch.accelerator.set_device_index(1)
    refdev.occupy(0.5)
    late = second + 1
    torch.accelerator.set_device_index(0)
    stats = {"first": first.mean(), "second": late.mean()}
    reduced = ddpstats.reduce_stats(stats, weight=first.sum()).values
    with StatsWindow() as window:
        window.add(stats, torch.tensor(1.0, device="refdev:1"))
        mean = window.flush().values["second"]
    assert torch.accelerator.current_device_index() == 0
    return reduced, mean


# -- a group that hangs -----------------------------------------------------------------------------------------------


def reduces_beside_a_device_that_hangs() -> dict[str, float]:
    """Reduce numbers of the host while the device's group waits for a rank that never comes."""
    join(timeout_sec=60)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="refdev"), async_op=True)
    start = time.monotonic()
    values: dict[str, float] = ddpstats.reduce_stats({"loss": float(dist.get_rank())}).values
    assert time.monotonic() - start < LIMIT_SEC
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1, device="refdev"))  # so that both end
    torch.accelerator.synchronize()
    return values
