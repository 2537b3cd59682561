"""What runs on the ranks of the capture's tests: a training loop as a user would write it, with a fault planted."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats import NaNCapture
from ddpstats.capture import CaptureVerdict
from ddpstats.testing import count_collectives, die
from tests.threads import lasting_threads


def make_model() -> nn.Module:
    """Everything that a replay has to get right: dropout, batch norm, a frozen parameter, a part in eval mode."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )
    model[4].eval()
    model[3].bias.requires_grad_(False)
    return model


def noisy_step(model: nn.Module, batch: Any) -> Tensor:
    """A loss that draws from every generator of the process."""
    scale = 1.0 + 0.1 * random.random() + 0.1 * float(numpy.random.normal())
    out: Tensor = model(batch["x"] + 0.01 * torch.randn_like(batch["x"]))
    loss: Tensor = (out * scale - batch["y"]).square().mean()
    return loss


def batch_of(step: int, rank: int, micro: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    return {"x": torch.randn(4, 6, generator=generator), "y": torch.randn(4, 3, generator=generator)}


@dataclass
class Plan:
    """How to train. ``plant``: (step, rank, micro-batch) -> the value put into the batch's tensor ``into``."""

    dirpath: str
    steps: int = 3
    accumulate: int = 1
    wrap: str = "ddp"
    plant: dict[tuple[int, int, int], float] = field(default_factory=dict)
    into: str = "x"
    captures: bool = True
    no_batch: tuple[int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "alone":
        return model
    view = how == "view"
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=view, bucket_cap_mb=0.0001, find_unused_parameters=False
    )
    if how == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def train(plan: Plan) -> dict[str, Any]:
    """The verdicts and the end of a run, on this rank."""
    model = make_model()
    module = wrapped(model, plan.wrap)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    verdicts: list[CaptureVerdict] = []
    threads = lasting_threads()
    capture = NaNCapture(plan.dirpath, model=module, optimizer=optimizer, **plan.options) if plan.captures else None
    with capture or contextlib.nullcontext():
        for step in range(plan.steps):
            _accumulate(plan, module, capture, step)
            if plan.wrap == "alone" and dist.is_initialized():
                _reduce_by_hand(model)
            if capture is not None:
                verdicts.append(capture.check())
                if verdicts[-1].should_stop:
                    break
            if capture is None or not verdicts[-1].should_skip:
                optimizer.step()
            optimizer.zero_grad()
    return {
        "verdicts": [asdict(verdict) | {"ok": verdict.ok} for verdict in verdicts],
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "drawn": (random.random(), float(numpy.random.normal()), float(torch.rand(()))),
        "threads": lasting_threads() - threads,
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
        + len(model._forward_pre_hooks),
    }


def _accumulate(plan: Plan, module: nn.Module, capture: NaNCapture | None, step: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if plan.no_batch == (step, rank):
        return
    for micro in range(plan.accumulate):
        batch = batch_of(step, rank, micro)
        if (step, rank, micro) in plan.plant:
            batch[plan.into][1, 2] = plan.plant[step, rank, micro]
        holds_back = isinstance(module, DistributedDataParallel) and micro < plan.accumulate - 1
        syncing = module.no_sync() if holds_back else contextlib.nullcontext()  # type: ignore[operator]
        capturing = contextlib.nullcontext() if capture is None else capture.micro_batch(batch)
        with syncing, capturing as kept:
            loss = noisy_step(module, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if kept is not None:
                kept.loss = loss


def _reduce_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


# -- faults that are not in a batch -----------------------------------------------------------------------------------


def ignored_parameter(dirpath: str) -> CaptureVerdict:
    """A parameter that DDP does not reduce is bad on rank 1: afterwards the ranks hold different gradients."""
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["5.bias"])  # type: ignore[no-untyped-call]
    module = DistributedDataParallel(model)
    with NaNCapture(dirpath, model=module) as capture:
        with capture.micro_batch(batch_of(0, dist.get_rank(), 0)) as kept:
            module(kept.batch["x"]).sum().backward()
        if dist.get_rank() == 1:
            model[5].bias.grad[0] = torch.inf  # type: ignore[index]
        return capture.check()


def scaled(dirpath: str, factor: float, steps: int, **options: Any) -> list[CaptureVerdict]:
    """Training under a GradScaler: its scale times ``factor`` times the loss is too large at first, or for ever."""
    module = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    verdicts = []
    with NaNCapture(dirpath, model=module, optimizer=optimizer, scaler=scaler, **options) as capture:
        for step in range(steps):
            batch = batch_of(step, dist.get_rank(), 0)
            with capture.micro_batch(batch):
                scaler.scale(factor * noisy_step(module, batch)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            verdicts.append(capture.check())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return verdicts


def sharded(dirpath: str) -> CaptureVerdict:
    """FSDP2: gradients are reduced and sharded before anybody sees them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with NaNCapture(dirpath, model=model) as capture:
        batch = torch.randn(4, 6)
        if dist.get_rank() == 1:
            batch[0, 0] = torch.nan
        with capture.micro_batch(batch):
            model(batch).sum().backward()
        return capture.check()


class Changing(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        batch.pop("y")
        batch["x"].mul_(2)
        out: Tensor = self.layer(batch["x"])
        return out


def changed_batch(dirpath: str) -> list[Any]:
    """What a later bundle holds of a batch that the step changes in place, alone in this process."""
    module = Changing()
    found = []
    with NaNCapture(dirpath, model=module, on_nonfinite="skip") as capture:
        for value in (torch.inf, 1.0, torch.nan):
            batch = {"x": torch.full((2, 6), value), "y": torch.ones(2, 3)}
            with capture.micro_batch(batch):
                module(batch).sum().backward()
            verdict = capture.check()
            module.zero_grad()
            if verdict.bundle is not None:
                part = torch.load(verdict.bundle / "rank00000.pt", weights_only=True)
                found.append((part["micro_batches"][0]["changed"], part["micro_batches"][0]["batch"]))
    return found


class Odd:
    """Nothing that a bundle can hold."""


def odd_batch(dirpath: str, store_batch: bool) -> list[CaptureVerdict]:
    module = DistributedDataParallel(make_model())
    verdicts = []
    with NaNCapture(dirpath, model=module, store_batch=store_batch) as capture:
        for step in range(2):
            batch: dict[str, Any] = batch_of(step, dist.get_rank(), 0)
            if dist.get_rank() == 1:
                batch["meta"] = [Odd()]
                batch["x"][0, 0] = torch.nan if step == 1 else 0.0
            with capture.micro_batch(batch):
                noisy_step(module, batch).backward()  # type: ignore[no-untyped-call]
            verdicts.append(capture.check())
    return verdicts


def full_disk(dirpath: str) -> list[CaptureVerdict]:
    """Rank 1 cannot write more than 4 kB a file; the step before left a good bundle."""
    module = DistributedDataParallel(make_model())
    verdicts = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with NaNCapture(dirpath, model=module, on_nonfinite="continue") as capture:
            for step in range(3):
                batch = batch_of(step, dist.get_rank(), 0)
                if step != 1:
                    batch["x"][0, 0] = torch.nan
                if dist.get_rank() == 1 and step == 2:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
                with capture.micro_batch(batch):
                    noisy_step(module, batch).backward()  # type: ignore[no-untyped-call]
                verdicts.append(capture.check())
                module.zero_grad()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return verdicts


def dies_while_writing(dirpath: str) -> CaptureVerdict:
    """Rank 1 is killed between its two files."""
    publish: Any = importlib.import_module("ddpstats.capture._publish")
    write = publish.write_part

    def killed(directory: Path, name: str, content: dict[str, Any]) -> Any:
        write(directory, name, content)
        die()

    if dist.get_rank() == 1:
        publish.write_part = killed
    module = DistributedDataParallel(make_model())
    with NaNCapture(dirpath, model=module) as capture:
        batch = batch_of(0, dist.get_rank(), 0)
        batch["x"][0, 0] = torch.nan
        with capture.micro_batch(batch):
            noisy_step(module, batch).backward()  # type: ignore[no-untyped-call]
        return capture.check()


def raises_in_forward(dirpath: str, how: str) -> float:
    """Rank 1 raises; how long rank 0 is kept. ``how``: what becomes of rank 1's process, and where rank 0 waits."""
    model = make_model()
    module = model if how == "in check" else DistributedDataParallel(model)
    capture = NaNCapture(dirpath, model=module)
    with capture.micro_batch(batch_of(0, dist.get_rank(), 0)) as kept:
        noisy_step(module, kept.batch).backward()  # type: ignore[no-untyped-call]
    capture.check()
    started = time.monotonic()
    try:
        with capture.micro_batch(batch_of(1, dist.get_rank(), 0)) as kept:
            if dist.get_rank() == 1:
                raise ValueError("label 17 of 3")
            noisy_step(module, kept.batch).backward()  # type: ignore[no-untyped-call]
        capture.check()
    except ValueError:
        if how == "ends":
            os._exit(7)
        if how == "lives on":
            time.sleep(15)
        raise
    finally:
        capture.close()
    return time.monotonic() - started


def other_settings(dirpath: str) -> CaptureVerdict:
    policy: Any = ("stop", "skip")[dist.get_rank()]
    with NaNCapture(dirpath, model=make_model(), on_nonfinite=policy, keep=1 + dist.get_rank()) as capture:
        return capture.check()


class Unreadable(Tensor):
    """A gradient that refuses whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dist.is_initialized() and "grad" not in str(func):
            raise ZeroDivisionError("not this one")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def unreadable_gradient(dirpath: str) -> tuple[str, str, bool]:
    """What `check` raises where rank 1 cannot look; and whether the next step is judged again."""
    model = make_model()
    with NaNCapture(dirpath, model=model) as capture:
        with capture.micro_batch(batch_of(0, 0, 0)) as kept:
            noisy_step(model, kept.batch).backward()  # type: ignore[no-untyped-call]
        weight = model.get_parameter("0.weight")
        assert isinstance(weight.grad, Tensor)
        if dist.get_rank() == 1:
            weight.grad = weight.grad.as_subclass(Unreadable)
        try:
            capture.check()
        except ddpstats.InvalidStats as error:
            weight.grad = None
            return type(error).__name__, str(error), capture.check().ok
        return "nothing", "", False


def cost_in_collectives(dirpath: str) -> list[int]:
    """How many collectives of ours a step makes, after the first."""
    module = DistributedDataParallel(make_model())
    found = []
    with NaNCapture(dirpath, model=module) as capture:
        for step in range(3):
            with capture.micro_batch(batch_of(step, dist.get_rank(), 0)) as kept:
                noisy_step(module, kept.batch).backward()  # type: ignore[no-untyped-call]
            with count_collectives() as count:
                capture.check()
            found.append(count.total)
    return found


# -- causes -----------------------------------------------------------------------------------------------------------

_calls = 0


def transient_step(model: nn.Module, batch: Any) -> Tensor:
    """Faulty in its first call on rank 1 only."""
    global _calls
    _calls += 1
    loss: Tensor = model(batch["x"]).square().mean()
    return loss * torch.nan if _calls == 1 and dist.get_rank() == 1 else loss


def broken_device_step(model: nn.Module, batch: Any) -> Tensor:
    """Faulty wherever rank 1 runs it."""
    loss: Tensor = model(batch["x"]).square().mean()
    return loss * torch.nan if dist.get_rank() == 1 else loss


def dividing_step(model: nn.Module, batch: Any) -> Tensor:
    """Divides by a count that may be zero."""
    out: Tensor = model(batch["x"]).square()
    loss: Tensor = out.sum() / (batch["x"] > 0).sum()
    return loss


def autocast_step(model: nn.Module, batch: Any) -> Tensor:
    """Products beyond 65504 are infinite in float16."""
    with torch.autocast("cpu", dtype=torch.float16):
        out: Tensor = model(batch["x"])
    return out.float().mean()


def communicating_step(model: nn.Module, batch: Any) -> Tensor:
    total = batch["x"].sum()
    if not torch.is_inference_mode_enabled():
        dist.all_reduce(total)
    loss: Tensor = model(batch["x"]).square().mean() + 0 * total
    return loss


def attributed(dirpath: str, step_name: str, batch_value: float) -> dict[str, Any]:
    """The verdict, and whether the reruns left the training as it was."""
    global _calls
    _calls = 0
    step_fn: Callable[[nn.Module, Any], Tensor] = globals()[step_name]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Dropout(0.2), nn.Linear(8, 3))
    if step_name == "autocast_step":
        model = nn.Sequential(nn.Linear(6, 3))
    module = DistributedDataParallel(model)
    with NaNCapture(dirpath, model=module, attribute=True, step_fn=step_fn) as capture:
        batch = batch_of(0, dist.get_rank(), 0)
        if dist.get_rank() == 1:
            batch["x"].fill_(batch_value)
        with capture.micro_batch(batch):
            step_fn(module, batch).backward()  # type: ignore[no-untyped-call]
        before = [t.clone() for t in (*model.parameters(), *model.buffers())], torch.get_rng_state(), random.getstate()
        gradients = [parameter.grad for parameter in model.parameters()]
        verdict = capture.check()
    after = [*model.parameters(), *model.buffers()], torch.get_rng_state(), random.getstate()
    return {
        "verdict": verdict,
        "untouched": all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(before[0], after[0], strict=True))
        and torch.equal(before[1], after[1])
        and before[2] == after[2]
        and all(a is b for a, b in zip(gradients, (parameter.grad for parameter in model.parameters()), strict=True)),
    }


def stats_after_capture(dirpath: str) -> float:
    """Reductions go on working beside a capture, and after it."""
    with NaNCapture(dirpath, model=DistributedDataParallel(make_model())) as capture:
        capture.check()
        return float(ddpstats.reduce_stats({"loss": float(dist.get_rank())}).values["loss"])
