"""Training under `NaNCapture` on the ranks of this folder's tests: one loop, and the faults that are planted in it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture, RankMissing
from ddpstats.capture import CaptureVerdict
from ddpstats.testing import count_collectives
from tests import training
from tests.training import Batch, Hooks, Trained, rank

BatchOf = Callable[[int, int], Batch]
LossOf = Callable[[nn.Module, Batch], Tensor]


def make_model() -> nn.Module:
    """Return a model with all that a replay has to get right: dropout, batch norm, eval mode, a frozen parameter."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )
    model[4].eval()
    model[3].bias.requires_grad_(False)
    return model


def noisy_step(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that draws from every generator of the process."""
    scale = 1.0 + 0.1 * random.random() + 0.1 * float(numpy.random.normal())
    out: Tensor = model(batch["x"] + 0.01 * torch.randn_like(batch["x"]))
    loss: Tensor = (out * scale - batch["y"]).square().mean()
    return loss


def planted(plant: Mapping[tuple[int, int, int], float], into: str = "x") -> BatchOf:
    """Return a ``batch_of`` that puts a value into a tensor of some batches: (step, rank, micro-batch) -> value."""

    def batch_of(step: int, micro: int) -> Batch:
        batch = training.batch_of(step, micro)
        if (step, rank(), micro) in plant:
            batch[into][1, 2] = plant[step, rank(), micro]
        return batch

    return batch_of


def wrapped(model: nn.Module, how: str) -> nn.Module:
    """Return the model as it is trained: in DDP, with a "view" or the "fp16" hook if asked for, or "alone"."""
    if how == "alone":
        return model
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=how == "view", bucket_cap_mb=0.0001)
    if how == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


@dataclass
class Captured:
    """One rank's run under a capture."""

    verdicts: list[CaptureVerdict]
    trained: Trained


def captured(
    dirpath: str,
    module: nn.Module,
    steps: int = 3,
    micro_batches: int = 1,
    *,
    batch_of: BatchOf = training.batch_of,
    loss_of: LossOf = training.loss_of,
    optimizer: torch.optim.Optimizer | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    after_backward: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Captured:
    """Train under a capture, which judges each step. ``around`` is entered inside each micro-batch."""
    verdicts: list[CaptureVerdict] = []
    running: list[Any] = []

    def kept_loss(module: nn.Module, batch: Batch) -> Tensor:
        running[-1].loss = loss = loss_of(module, batch)
        return loss

    with NaNCapture(dirpath, model=module, optimizer=optimizer, **options) as capture:

        @contextlib.contextmanager
        def micro_batch(batch: Batch) -> Iterator[None]:
            with capture.micro_batch(batch) as micro, around():
                running[:] = [micro]
                yield

        def judge(step: int) -> bool:
            verdicts.append(capture.check())
            return not verdicts[-1].should_skip

        trained = training.train(
            module,
            steps,
            micro_batches,
            batch_of=batch_of,
            loss_of=kept_loss,
            optimizer=optimizer,
            hooks=Hooks(micro_batch, after_backward, judge),
        )
    return Captured(verdicts, trained)


def trained(
    dirpath: str,
    how: str = "ddp",
    plant: Mapping[tuple[int, int, int], float] | None = None,
    into: str = "x",
    steps: int = 2,
    micro_batches: int = 1,
    **options: Any,
) -> Captured:
    """Train `make_model`, wrapped in that way, with these values planted in batches."""
    module = wrapped(make_model(), how)
    return captured(
        dirpath,
        module,
        steps,
        micro_batches,
        batch_of=planted(plant or {}, into),
        loss_of=noisy_step,
        optimizer=torch.optim.Adam(module.parameters(), lr=0.01),
        after_backward=lambda step: reduce_by_hand(module) if how == "alone" else None,
        **options,
    )


def reduce_by_hand(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and dist.is_initialized():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


# -- faults that are not in a batch -----------------------------------------------------------------------------------


def one_rank_without_a_batch(dirpath: str) -> CaptureVerdict:
    """Rank 1 has a NaN in its batch, and rank 0 has no batch."""
    model = make_model()
    with NaNCapture(dirpath, model=model) as capture:
        if rank() == 1:
            with capture.micro_batch(planted({(0, 1, 0): torch.nan})(0, 0)) as micro:
                noisy_step(model, micro.batch).backward()  # type: ignore[no-untyped-call]
        reduce_by_hand(model)
        return capture.check()


def ignored_parameter(dirpath: str) -> CaptureVerdict:
    """A parameter that DDP does not reduce is bad on rank 1: afterwards the ranks hold different gradients."""
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["5.bias"])  # type: ignore[no-untyped-call]

    def spoil(step: int) -> None:
        if rank() == 1:
            model[5].bias.grad[0] = torch.inf  # type: ignore[index]

    return captured(dirpath, DistributedDataParallel(model), 1, after_backward=spoil).verdicts[0]


def scaled(dirpath: str, factor: float, steps: int, **options: Any) -> list[CaptureVerdict]:
    """Train under a GradScaler: its scale times ``factor`` times the loss is too large at first, or for ever."""
    module = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    verdicts = []
    with NaNCapture(dirpath, model=module, optimizer=optimizer, scaler=scaler, **options) as capture:
        for step in range(steps):
            batch = training.batch_of(step)
            with capture.micro_batch(batch):
                scaler.scale(factor * noisy_step(module, batch)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            verdicts.append(capture.check())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return verdicts


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def one_row() -> nn.Module:
    return nn.Linear(6, 1)


def sum_step(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch["x"]).sum()  # type: ignore[no-any-return]


def sharded_model(make: Callable[[], nn.Module] = plain_model) -> nn.Module:
    """Return a model under FSDP2, which reduces and shards gradients before a capture can see them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


class Sharded(NamedTuple):
    """A verdict under FSDP2, how often a parameter was gathered for it, and the parameters before the step."""

    verdict: CaptureVerdict
    gathered: int
    parameters: dict[str, Any]


def sharded(dirpath: str, **options: Any) -> Sharded:
    from torch.distributed.tensor import DTensor

    model, gathered, full_tensor = sharded_model(), 0, DTensor.full_tensor
    shards: dict[str, Any] = dict(model.named_parameters())
    parameters = {name: full_tensor(shard).tolist() for name, shard in shards.items()}

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal gathered
        gathered += 1
        return full_tensor(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", counted)
        verdict = captured(dirpath, model, 1, batch_of=planted({(0, 1, 0): torch.nan}), **options).verdicts[0]
    return Sharded(verdict, gathered, parameters)


def sharded_row(dirpath: str) -> CaptureVerdict:
    """The verdict of a step under FSDP2 in which rank 1 has no element of any parameter."""
    batch_of = planted({(0, 0, 0): torch.nan})
    return captured(dirpath, sharded_model(one_row), 1, batch_of=batch_of, loss_of=sum_step).verdicts[0]


def backward_on_rank_0(dirpath: str) -> CaptureVerdict:
    """A step whose loss is not finite, for which rank 1 leaves out the backward pass."""
    model, batch = one_row(), {"x": torch.full((2, 6), torch.nan)}
    with NaNCapture(dirpath, model=model) as capture:
        with capture.micro_batch(batch):
            loss = sum_step(model, batch)
            if rank() == 0:
                loss.backward()  # type: ignore[no-untyped-call]
        return capture.check()


def changed_batch(dirpath: str) -> list[CaptureVerdict]:
    """Train a step whose batch is infinite, a finite one, and one whose batch is NaN; each changes it in place."""
    values = (torch.inf, 1.0, torch.nan)

    def changing_loss(module: nn.Module, batch: Batch) -> Tensor:
        batch.pop("y")
        return module(batch["x"].mul_(2)).sum()  # type: ignore[no-any-return]

    return captured(
        dirpath,
        nn.Linear(6, 3),
        batch_of=lambda step, _: {"x": torch.full((2, 6), values[step]), "y": torch.ones(2, 3)},
        loss_of=changing_loss,
        on_nonfinite="skip",
    ).verdicts


class Odd:
    """An object that a bundle cannot hold."""


def odd_batch(dirpath: str, store_batch: bool) -> list[CaptureVerdict]:
    def batch_of(step: int, micro: int) -> Any:
        batch = planted({(1, 1, 0): torch.nan})(step, micro)
        return batch | {"meta": [Odd()]} if rank() == 1 else batch

    module = DistributedDataParallel(make_model())
    return captured(dirpath, module, 2, batch_of=batch_of, store_batch=store_batch).verdicts


def full_disk(dirpath: str) -> list[CaptureVerdict]:
    """Rank 1 cannot write more than 4 kB a file in the third step; the first step left a good bundle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(step: int) -> None:
        if rank() == 1 and step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    plant = {(step, member, 0): torch.nan for step in (0, 2) for member in (0, 1)}
    module = DistributedDataParallel(make_model())
    try:
        run = captured(dirpath, module, batch_of=planted(plant, "y"), after_backward=fill, on_nonfinite="skip")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return run.verdicts


def raises_in_forward(dirpath: str, how: str) -> tuple[str, float]:
    """Rank 1 raises in step 1; return what the others raise, and how many seconds later.

    ``how``: rank 1 "ends" while the others wait in DDP, or they wait "in check".
    """
    group = dist.new_group()
    dist.barrier()
    module = make_model() if how == "in check" else DistributedDataParallel(make_model(), process_group=group)
    begun: list[float] = []

    def loss_of(module: nn.Module, batch: Batch) -> Tensor:
        begun.append(time.monotonic())
        if rank() == 1 and len(begun) == 2:
            raise ValueError("label 17 of 3")
        return noisy_step(module, batch)

    try:
        captured(dirpath, module, 2, loss_of=loss_of, group=group)
    except ValueError:
        if how == "ends":
            os._exit(7)
    except RankMissing as error:
        return str(error), time.monotonic() - begun[1]
    return "", 0.0


def other_settings(dirpath: str) -> CaptureVerdict:
    policy: Any = ("stop", "skip")[rank()]
    with NaNCapture(dirpath, model=make_model(), on_nonfinite=policy, keep=1 + rank()) as capture:
        return capture.check()


def collectives_of_a_step(dirpath: str) -> list[int]:
    """Return how many collectives of ddpstats `check` makes in the second and the third step."""
    module = DistributedDataParallel(make_model())
    counts = []
    with NaNCapture(dirpath, model=module) as capture:
        for step in range(3):
            with capture.micro_batch(training.batch_of(step)) as micro:
                noisy_step(module, micro.batch).backward()  # type: ignore[no-untyped-call]
            with count_collectives() as count:
                capture.check()
            counts.append(count.total)
    return counts[1:]
