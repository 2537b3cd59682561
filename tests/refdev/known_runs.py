"""Steps of `test_known` that were expected to break on an accelerator, with their legal twins."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import (
    NaNCapture,
    RankMissing,
    Sentinel,
    StatsReducer,
    StatsWindow,
    collective_guard,
    reduce_stats,
)
from ddpstats._observe.gradient_norms import held_values
from ddpstats._observe.groups import longest_timeout_sec
from ddpstats._rerun.state import RandomState
from ddpstats.capture import CaptureVerdict
from ddpstats.testing import BitFlip, inject_bit_flips
from tests import training
from tests.capture import attribution_runs

from .runs import join

# -- a device that does not come to its end ----------------------------------------------------------------------------


def judges_while_the_device_is_busy(dirpath: str, timeout_sec: float) -> dict[str, tuple[int, ...]]:
    """Let the device of rank 0 work until all ranks have judged; return which ranks each kind of call misses."""
    refdev = join()
    value = torch.ones(1, device="refdev")

    def started(group: Any) -> Any:
        return StatsReducer(group=group, timeout_sec=timeout_sec).start({"loss": value}).result()

    def flushed(group: Any) -> Any:
        with StatsWindow(group=group, timeout_sec=timeout_sec) as window:
            window.add({"loss": value})
            return window.flush()

    calls: dict[str, Callable[[Any], Any]] = {
        "reduce": lambda group: StatsReducer(group=group, timeout_sec=timeout_sec)({"loss": value}),
        "start": started,
        "window": flushed,
    }
    models = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to("refdev") for _ in range(2)]

    def captures(group: Any) -> Any:
        with NaNCapture(dirpath, model=models[0], group=group) as capture:
            with capture.micro_batch(None):
                models[0](torch.ones(2, 4, device="refdev")).sum().backward()
            return capture.check()

    def watches(group: Any) -> Any:
        with Sentinel(models[1], mode=1, group=group) as sentinel:
            models[1](torch.ones(2, 4, device="refdev")).sum().backward()
            return sentinel.step()

    calls |= {"capture": captures, "sentinel": watches}
    groups = {name: dist.new_group(backend="gloo") for name in calls}
    for group in groups.values():
        reduce_stats({"first use": 1.0}, group=group)
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(timeout_sec)
    if dist.get_rank() == 0:
        refdev.occupy(120.0)
    missing = {}
    for name, call in calls.items():
        try:
            call(groups[name])
        except RankMissing as error:
            missing[name] = error.missing_ranks
    refdev.release()
    return missing


# -- errors of the backend --------------------------------------------------------------------------------------------


def broken_group(dirpath: str, what: str) -> str:
    """Rank 1 raises in its micro-batch, and ends. Rank 0 begins collectives until the backend refuses them."""
    join()
    tensor = torch.ones(1, device="refdev")
    dist.all_reduce(tensor)
    model = training.make_model().to("refdev")
    if dist.get_rank() == 1:
        with contextlib.suppress(ValueError), _watcher(dirpath, what, model) as micro_batch, micro_batch(None):
            raise ValueError("no room on this device")
        os._exit(1)
    try:
        with _watcher(dirpath, what, model) as micro_batch, micro_batch(None):
            for _ in range(5000):
                dist.all_reduce(tensor, async_op=True)
                time.sleep(0.02)
    except RankMissing as error:
        return f"{error.missing_ranks} {error}\nbecause of {error.__cause__}"
    return ""


@contextlib.contextmanager
def _watcher(dirpath: str, what: str, model: nn.Module) -> Any:
    if what == "capture":
        with NaNCapture(dirpath, model=model) as capture:
            yield capture.micro_batch
    else:
        with collective_guard(what):  # type: ignore[arg-type]
            dist.all_reduce(torch.ones(1, device="refdev"))
            yield lambda batch: contextlib.nullcontext()


def timeouts() -> list[float]:
    """Return how long a collective of a group may take, where backends say so, and where they do not."""
    refdev = join()

    class Silent(refdev.native.RefBackend):  # type: ignore[misc,name-defined]
        @property
        def options(self) -> Any:
            raise RuntimeError("Backend silent does not implement getBackendOptions")

    kept = []

    def create(options: Any, _: Any = None) -> Any:
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=timedelta(hours=1))
        kept.append(Silent(gloo, options.group_rank, options.group_size, options.timeout.total_seconds()))
        return kept[-1]

    dist.Backend.register_backend("silent", create, extended_api=True, devices=["refdev"])
    seconds = []
    for backend in ("cpu:gloo,refdev:refccl", "refccl", "cpu:gloo,refdev:silent", "silent"):
        group = dist.new_group(timeout=timedelta(seconds=40), backend=backend)
        seconds.append(longest_timeout_sec(group))
        dist.destroy_process_group(group)
    return seconds


def waits_for_a_late_rank(timeout_sec: float, is_late: bool) -> str:
    """Let rank 0 wait for the device longer than the guard's timeout: for a rank that is late, or for a long kernel."""
    refdev = join()
    rank, tensor = dist.get_rank(), torch.ones(1, device="refdev")
    try:
        with collective_guard("strict", timeout_sec=timeout_sec):
            dist.all_reduce(tensor)
            if rank == 1 and is_late:
                time.sleep(timeout_sec + 4)
            elif rank == 1:
                refdev.occupy(timeout_sec + 3)
            dist.all_reduce(tensor)
            assert tensor.item() == 4.0
            dist.barrier()
    except RankMissing as error:
        return f"{error.missing_ranks} {error}"
    return ""


def shapes_that_differ(mode: Any) -> None:
    """Sum tensors of the device whose shapes differ between ranks, and read the sum, which may never be there."""
    join(timeout_sec=5)
    with collective_guard(mode) as guard:
        dist.all_reduce(torch.ones(3, device="refdev"))
        guard.step()
        tensor = torch.ones(3 + dist.get_rank(), device="refdev")
        dist.all_reduce(tensor, async_op=True).wait()
        tensor.sum().item()
        guard.step()


# -- capture ----------------------------------------------------------------------------------------------------------


def _sharded(width: int, device: str = "refdev") -> nn.Module:
    """Return a module that is sharded; the one element of its last bias is on rank 0, so that rank 1 has none of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # a second of imports

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)), nn.LayerNorm(width), nn.Linear(width, 1))
    model.to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in [*model.children(), model]:
        fully_shard(layer, mesh=mesh)
    return model


def _squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def sharded_steps(dirpath: str) -> dict[str, Any]:
    """Check steps of a sharded model, the third one with a NaN on rank 1. Return verdicts and the memory they took."""
    join()
    model = _sharded(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kinds, held, peaks = [], [], []
    with (
        NaNCapture(dirpath, model=model, on_nonfinite="skip", attribute=True, step_fn=_squares) as capture,
        Sentinel(model, mode=1, digest_every_steps=1) as sentinel,
    ):
        for step in range(5):
            batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to("refdev")
            if step == 2 and dist.get_rank() == 1:
                batch[0, 0] = torch.nan
            with capture.micro_batch(batch):
                _squares(model, batch).backward()  # type: ignore[no-untyped-call]
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            verdict, is_silent = capture.check(), sentinel.step().ok
            if verdict.ok:
                optimizer.step()
            torch.accelerator.synchronize()
            peaks.append(torch.accelerator.max_memory_allocated() - before)
            optimizer.zero_grad()
            held.append(torch.accelerator.memory_allocated())
            kinds.append((verdict.kind, is_silent))
    try:
        torch._foreach_norm([torch.empty(0, device="refdev")], float("inf"))
    except RuntimeError:
        pass
    else:
        raise AssertionError("the device takes the largest magnitude of nothing, so this shows nothing")
    shards = {name: held_values(parameter.detach()) for name, parameter in model.named_parameters()}
    empty = [name for name, shard in shards.items() if not shard.numel()]
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    is_finite = all(bool(shard.isfinite().all()) for shard in shards.values())
    return {
        "kinds": kinds,
        "held": held,
        "peaks": peaks,
        "empty": empty,
        "whole": whole,
        "is_finite": is_finite,
    }


def raises_and_lives_on(dirpath: str, syncs: bool) -> list[str]:
    """Rank 1 raises in its second micro-batch, catches that, and checks the step as all ranks do; then a right step.

    ``syncs``: rank 0 reduces its gradients in that micro-batch, and so waits for rank 1 for ever.
    """
    join(timeout_sec=60)
    model = DistributedDataParallel(training.make_model().to("refdev"))
    results: list[str] = []
    with NaNCapture(dirpath, model=model) as capture:
        for step in range(2):
            for micro in range(3):
                batch = _batch(step, micro)
                is_bad = (step, micro) == (0, 1)
                is_last = micro == 2 or (is_bad and syncs)
                with contextlib.suppress(ValueError), training.syncing(model, is_last), capture.micro_batch(batch):
                    if is_bad and dist.get_rank() == 1:
                        raise ValueError("a sample that cannot be read")
                    training.loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                if is_bad and syncs:
                    break
            try:
                results.append(capture.check().kind)
            except RankMissing as error:
                results.append(f"{error.missing_ranks} {error}")
                break
            model.zero_grad()
    return results


def attributed(dirpath: str, step: str) -> tuple[CaptureVerdict, bool, int]:
    """Return the verdict on a step, whether its reruns left the training as it was, and the bytes they left behind."""
    join()
    before = torch.accelerator.memory_allocated()
    verdict, is_untouched = attribution_runs.attributed(dirpath, step, step, 1.0, device="refdev")
    gc.collect()
    return verdict, is_untouched, torch.accelerator.memory_allocated() - before


def _batch(step: int, micro: int = 0) -> training.Batch:
    return {name: tensor.to("refdev") for name, tensor in training.batch_of(step, micro).items()}


def bundle_under_checkpointing(dirpath: str, is_bad: bool = True) -> str:
    """Capture a NaN that arises in a segment of reentrant checkpointing; return the bundle."""
    join()
    from . import known_models

    model = known_models.make_checkpointed().to("refdev")
    with NaNCapture(dirpath, model=model) as capture:
        batch = {**_batch(0), "scale": torch.ones(3, device="refdev")}
        batch["x"].requires_grad_()  # without which reentrant checkpointing has no gradients
        if is_bad:
            model.get_buffer("shift")[1] = -10.0
        with capture.micro_batch(batch) as micro:
            loss = known_models.reduced_loss(model, batch)
            micro.loss = loss
            loss.backward()  # type: ignore[no-untyped-call]
        verdict = capture.check()
    return str(verdict.bundle or "")


# -- runs again -------------------------------------------------------------------------------------------------------


def replayed_on_a_stream(flips: list[BitFlip]) -> dict[str, Any]:
    """Train on a stream of the program's own that is always behind, with all layers of the sentinel."""
    refdev = join()
    before, stream = torch.accelerator.current_stream(), torch.Stream("refdev")
    plain = training.make_model().to("refdev")
    torch.accelerator.synchronize()
    verdicts, held = [], []
    torch.accelerator.set_stream(stream)
    try:
        model = DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with (
            Sentinel(model, mode=1, digest_every_steps=1, replay_every_steps=1, replay_fn=training.loss_of) as sentinel,
            inject_bit_flips(model, flips) as faults,
        ):
            for step in range(4):
                refdev.occupy(0.2)
                batch = _batch(step)
                with sentinel.micro_batch(batch):
                    training.loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                refdev.occupy(0.2)
                verdict = sentinel.step()
                verdicts.append(verdict.message)
                optimizer.step()
                optimizer.zero_grad()
                faults.step()
                del batch
                torch.accelerator.synchronize()
                held.append(torch.accelerator.memory_allocated())
    finally:
        torch.accelerator.set_stream(before)
    return {"verdicts": verdicts, "held": held}


class OnTwoDevices(nn.Module):
    """Begins on the device, and goes on in host memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64)).to("refdev")
        self.second = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).to("cpu"))
        return out


def values_on_two_devices(detector: Any) -> list[list[str]]:
    """Return what the sentinel logs of each value of two runs, the second one on a device that is behind."""
    refdev = join()
    logs = []
    for is_behind in (False, True):
        model = OnTwoDevices()
        with training.logged(logging.INFO) as messages, Sentinel(model, mode=3, detector=detector) as sentinel:
            for step in range(2):
                batch = _batch(step)
                loss = (model(batch["x"]) - batch["y"].cpu()).square().mean()
                if is_behind:
                    refdev.occupy(0.3)
                loss.backward()
                sentinel.step()
        logs.append(list(messages))
    return logs


def random_state_of_the_device() -> list[bool]:
    """Take the generators' state, draw on both devices, and do so again from the state, by itself and by plain data."""
    join()
    device = torch.device("refdev", 0)
    state = RandomState.take(device)

    def drawn() -> list[float]:
        return [torch.rand((), device=device).item(), torch.rand(()).item()]

    first = drawn()
    state.restore()
    second = drawn()
    RandomState.from_plain(state.to_plain()).restore()
    third = drawn()
    RandomState.from_plain(state.to_plain(), torch.device("cpu")).restore()  # the device's generator is left alone
    fourth = drawn()
    return [first == second, first == third, first[1] == fourth[1], first[0] != fourth[0]]
