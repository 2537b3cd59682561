"""Functions that run on the ranks of the tests of peer replay: batches, modules and threads that make trouble."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import ConfigError, Sentinel, SentinelAlarm
from ddpstats._rerun.run import run_alone
from ddpstats.testing import count_collectives
from tests.training import tensor_of_kind


class Small(nn.Module):
    """A model with one norm, so one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.first(x)))
        return out


class Counting(Small):
    """Counts its forward passes, remembers them in a buffer that grows, and has an attribute that is a tensor later."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.count, self.marks = 0, (0, "none")
        self.cached: Tensor | None = None
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.marks = (self.count, "run")
        self.last = self.count
        self.seen = torch.cat([self.seen, torch.ones(1)])
        return super().forward(x) * self.seen.numel()


class Averaging(Small):
    """Subtracts the average of what it saw, a buffer that each forward pass changes."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.average)


def again_after_an_error(steps: int) -> list[bool]:
    """Train; on rank 1 each micro-batch but the first is lost after its forward pass, as when memory is short."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), Averaging()
    ddp, found = DistributedDataParallel(model, broadcast_buffers=False), []
    with Sentinel(ddp, mode=2, replay_every_steps=1, replay_fn=loss_of) as sentinel:
        for step in range(steps):
            x = torch.randn(3, 4)
            if rank == 1 and step:
                with contextlib.suppress(MemoryError), sentinel.micro_batch(x):
                    model(x)
                    raise MemoryError
            with sentinel.micro_batch(x):
                loss_of(ddp, x).backward()  # type: ignore[no-untyped-call]
            found.append(sentinel.step().ok)
            ddp.zero_grad()
    return found


class Items(list[Any]):
    """A list of a class of its own, which is kept by reference."""


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) ** 2).sum()
    return loss


def first_item(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return loss_of(model, batch[0])


def without_forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of the model's parts, as a program has it that calls a method of its own."""
    assert isinstance(model, Small)
    return loss_of(nn.Sequential(model.first, model.norm, model.head), x)


def run_without_forward() -> Told:
    """Train replicas that nothing reduces, so that peer replay alone compares them."""
    torch.manual_seed(0)
    model = Small()

    def step(number: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        x = torch.randn(3, 4)
        with sentinel.micro_batch(x):
            without_forward(model, x).backward()  # type: ignore[no-untyped-call]

    return trained(model, 2, without_forward, step)


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch["x"]) * batch["weight"]


@dataclass
class Told:
    """Of one rank: what `Sentinel.step` raised, the warnings, and how often ``replay_fn`` ran."""

    ok: list[bool] = field(default_factory=list)
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    runs: int = 0


def small() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Small())


def trained(
    model: nn.Module,
    steps: int,
    replay_fn: Callable[..., Tensor],
    run: Callable[[int, Sentinel], None],
    **options: Any,
) -> Told:
    """``run``: a step, with its number."""
    told = Told()

    def counted(module: nn.Module, batch: Any) -> Tensor:
        told.runs += 1
        return replay_fn(module, batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Sentinel(model, replay_fn=counted, **{"mode": 2, "replay_every_steps": 1, **options}) as sentinel:
                for step in range(steps):
                    run(step, sentinel)
                    told.ok.append(sentinel.step().ok)
        except (ConfigError, SentinelAlarm) as error:
            told.error = str(error)
    told.warnings = [str(one.message) for one in caught]
    return told


def odd_loop(habit: str, steps: int = 2, replay_fn: Callable[..., Tensor] = first_item) -> Told:
    """Train in a loop with a habit that matters to peer replay.

    Args:
        habit: "gradients left": a backward pass before the loop, and no ``zero_grad()``; "zeroed inside": the same, but
            zeroed between forward and backward pass; "two passes": two in each micro-batch; "changed in place": each
            batch; "emptied": rank 0's first batch.
        steps: how many.
        replay_fn: what the sentinel runs.
    """
    model, zeroes = small(), habit not in ("gradients left", "zeroed inside")
    if not zeroes:
        loss_of(model, torch.ones(3, 4)).backward()  # type: ignore[no-untyped-call]

    def run(step: int, sentinel: Sentinel) -> None:
        if zeroes:
            model.zero_grad()
        x = torch.randn(3, 4)
        empties = habit == "emptied" and (dist.get_rank(), step) == (0, 0)
        batch = Items([x]) if empties else [x]
        with sentinel.micro_batch(batch):
            for _ in range(2 if habit == "two passes" else 1):
                loss = loss_of(model, x)
                if habit == "zeroed inside":
                    model.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            if empties:
                batch.pop()
            if empties or habit == "changed in place":
                x.mul_(2)

    return trained(model, steps, replay_fn, run)


def twice_the_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return 2 * first_item(model, batch)


def with_kept(batch: Any, buffer: Any, wrong: bool, mode: int) -> Told:
    """Train replicas whose batches and modules hold such tensors; rank 1's gradient is ``wrong`` in the second step.

    ``batch``, ``buffer``: a dtype, or None for none, or "foreign".
    """
    torch.manual_seed(0)
    model, rank = Small(), dist.get_rank()
    if buffer is not None:
        model.register_buffer("kept", tensor_of_kind(buffer, 1.0 + rank))

    def run(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        given = [torch.ones(3, 4) + torch.eye(3, 4) + rank, *([] if batch is None else [torch.ones(3).to(batch)])]
        is_wrong = wrong and (rank, step) == (1, 1)
        hook = model.head.weight.register_hook(lambda gradient: gradient * 1.5) if is_wrong else None  # type: ignore[no-untyped-call]
        with sentinel.micro_batch(given):
            first_item(model, given).backward()  # type: ignore[no-untyped-call]
        if hook is not None:
            hook.remove()

    return trained(model, 3, first_item, run, mode=mode)


def an_outlier_of_data(batch: Any = None, buffer: Any = None) -> Told:
    """Rank 1's values are always 30 times as large as the others'; at step 30 rank 0's are 5000 times as large.

    ``batch``, ``buffer``: the dtype of one tensor more in there, or None for none.
    """
    model, rank = small(), dist.get_rank()
    if buffer is not None:
        model.module.register_buffer("kept", torch.ones(3).to(buffer))

    def run(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        weight = torch.tensor(30.0 if rank == 1 else 5000.0 if (rank, step) == (0, 30) else 1.0)
        given = {"x": torch.ones(3, 4) * (1 + 0.1 * rank) + torch.eye(3, 4), "weight": weight}
        if batch is not None:
            given["kept"] = torch.ones(3).to(batch)
        with sentinel.micro_batch(given):
            weighted(model, given).backward()  # type: ignore[no-untyped-call]

    return trained(model, 31, weighted, run, detector="v3", replay_every_steps=0)


def beside_collectives_of_a_thread() -> tuple[Told, list[str]]:
    """Train while a thread communicates on a group of its own, and return the thread's errors, too.

    Each run of a step waits until the thread has communicated once more. Ranks agree on the thread's last collective.
    """
    model, group = small(), dist.new_group()
    is_over, communicated = threading.Event(), threading.Condition()
    errors: list[str] = []

    def communicate() -> None:
        ended = torch.zeros(1)
        try:
            while ended.item() < dist.get_world_size():
                ended = torch.tensor([float(is_over.is_set())])
                dist.all_reduce(ended, group=group)
                with communicated:
                    communicated.notify_all()
        except Exception as error:
            errors.append(str(error))

    def run(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        x = torch.randn(3, 4)
        with sentinel.micro_batch(x):
            waiting(model, x).backward()  # type: ignore[no-untyped-call]

    def waiting(model: nn.Module, x: Tensor) -> Tensor:
        with communicated:
            assert communicated.wait(30)
        return loss_of(model, x)

    thread = threading.Thread(target=communicate)
    thread.start()
    told = trained(model, 4, waiting, run)
    is_over.set()
    thread.join(30)
    dist.destroy_process_group(group)
    return told, errors


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        dist.all_reduce(gradients[0])
        return gradients[0]


def refused_collectives() -> dict[str, str]:
    """What each kind of collective raises under `run_alone`."""
    found: dict[str, str] = {}

    def tried(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            found[name] = "none"
        except Exception as error:
            found[name] = str(error)

    x = torch.ones(2, requires_grad=True)
    loss = _Reduced.apply(x).sum()  # type: ignore[no-untyped-call]
    with run_alone("step_fn", torch.device("cpu")):
        tried("own", lambda: dist.all_reduce(torch.ones(1)))
        tried("backward", lambda: loss.backward())
        other = threading.Thread(target=tried, args=("thread", lambda: dist.all_reduce(torch.ones(1))))
        other.start()
        other.join(30)
    return found


def with_a_mask(steps: int) -> tuple[Told, int]:
    """A large buffer that ranks have alike, beside running statistics that they do not. Bytes sent come second."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.BatchNorm1d(4), Small())
    inner.register_buffer("mask", torch.zeros(1 << 20))
    model = DistributedDataParallel(inner, broadcast_buffers=False)

    def run(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        x = torch.randn(3, 4) + dist.get_rank()
        with sentinel.micro_batch(x):
            loss_of(model, x).backward()  # type: ignore[no-untyped-call]

    with count_collectives() as seen:
        told = trained(model, steps, loss_of, run)
    return told, seen.bytes_by_op.total()


def with_channels_last() -> Told:
    """Batches in another order of memory than the weights: another kernel, which rounds otherwise."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Conv2d(3, 17, 3), nn.GELU(), nn.Conv2d(17, 9, 3), nn.Flatten(), nn.Linear(729, 1))
    )

    def run(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(7, 3, 13, 13).to(memory_format=torch.channels_last)
        with sentinel.micro_batch(x):
            loss_of(model, x).backward()  # type: ignore[no-untyped-call]

    return trained(model, 2, loss_of, run)


def compiled_elsewhere() -> Told:
    """Rank 1's gradient is wrong by the last bits once, in a process that compiled something the step does not use."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    model, rank = small(), dist.get_rank()

    def run(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        x = torch.ones(3, 4) + torch.eye(3, 4) + rank
        wrong = (rank, step) == (1, 1)
        hook = model.module.head.weight.register_hook(lambda gradient: gradient * (1 + 1e-6)) if wrong else None
        with sentinel.micro_batch(x):
            loss_of(model, x).backward()  # type: ignore[no-untyped-call]
        if hook is not None:
            hook.remove()

    return trained(model, 3, loss_of, run)
