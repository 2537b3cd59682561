"""Functions that run on the ranks of the tests of peer replay: batches, modules and threads that make trouble."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import ConfigError, Sentinel, SentinelAlarm
from ddpstats._observe.gradients import unwrap
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


class Items(list[Any]):
    """A list of an unknown class, which is kept by reference."""


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) ** 2).sum()
    return loss


def first_item(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return loss_of(model, batch[0])


def without_forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of the model's parts, as a program has it that calls another method than forward()."""
    assert isinstance(model, Small)
    return loss_of(nn.Sequential(model.first, model.norm, model.head), x)


def run_without_forward() -> ReplayOutcome:
    """Train replicas that nothing reduces, so that peer replay alone compares them."""
    torch.manual_seed(0)
    return trained(Small(), 2, without_forward, lambda step: torch.randn(3, 4))


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch["x"]) * batch["weight"]


@dataclass
class ReplayOutcome:
    """One rank's verdicts, what `Sentinel.step` raised, the warnings, and how often ``replay_fn`` ran."""

    ok: list[bool] = field(default_factory=list)
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    runs: int = 0


def small() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Small())


@dataclass(frozen=True)
class WrongGradient:
    """A factor on the gradient of the model's head, in one step on one rank."""

    rank: int
    step: int
    factor: float

    @contextlib.contextmanager
    def applied(self, model: nn.Module, step: int) -> Iterator[None]:
        weight: Any = unwrap(model).get_parameter("head.weight")
        is_wrong = (dist.get_rank(), step) == (self.rank, self.step)
        hook = weight.register_hook(lambda gradient: gradient * self.factor) if is_wrong else None
        yield
        if hook is not None:
            hook.remove()


def trained(
    model: nn.Module,
    steps: int,
    replay_fn: Callable[..., Tensor],
    batch_of: Callable[[int], Any],
    *,
    wrong: WrongGradient | None = None,
    run: Callable[[int, Sentinel], None] | None = None,
    **options: Any,
) -> ReplayOutcome:
    """Train under peer replay of each step. ``run`` is one step, with its number; None: the step that is replayed."""
    outcome = ReplayOutcome()

    def counted(module: nn.Module, batch: Any) -> Tensor:
        outcome.runs += 1
        return replay_fn(module, batch)

    def run_step(step: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        batch = batch_of(step)
        around = contextlib.nullcontext() if wrong is None else wrong.applied(model, step)
        with sentinel.micro_batch(batch), around:
            replay_fn(model, batch).backward()  # type: ignore[no-untyped-call]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Sentinel(model, replay_fn=counted, **{"mode": 2, "replay_every_steps": 1, **options}) as sentinel:
                for step in range(steps):
                    (run or run_step)(step, sentinel)
                    outcome.ok.append(sentinel.step().ok)
        except (ConfigError, SentinelAlarm) as error:
            outcome.error = str(error)
    outcome.warnings = [str(warning.message) for warning in caught]
    return outcome


def odd_loop(habit: str, steps: int = 2, replay_fn: Callable[..., Tensor] = first_item) -> ReplayOutcome:
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

    return trained(model, steps, replay_fn, lambda step: None, run=run)


def twice_the_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return 2 * first_item(model, batch)


def with_kept(batch: Any, buffer: Any, wrong: bool, mode: int) -> ReplayOutcome:
    """Train replicas whose batches and modules hold such tensors; rank 1's gradient is ``wrong`` in the second step.

    ``batch``, ``buffer``: a dtype, or None for none, or "foreign".
    """
    torch.manual_seed(0)
    model, rank = Small(), dist.get_rank()
    if buffer is not None:
        model.register_buffer("kept", tensor_of_kind(buffer, 1.0 + rank))

    def batch_of(step: int) -> list[Tensor]:
        x = torch.ones(3, 4) + torch.eye(3, 4) + rank
        return [x] if batch is None else [x, torch.ones(3).to(batch)]

    return trained(model, 3, first_item, batch_of, wrong=WrongGradient(1, 1, 1.5) if wrong else None, mode=mode)


def an_outlier_of_data(buffer: torch.dtype | None = None) -> ReplayOutcome:
    """Train with values that are always 30 times as large on rank 1; rank 0's are 5000 times as large at step 30.

    ``buffer``: the dtype of a buffer that the model has besides.
    """
    model, rank = small(), dist.get_rank()
    if buffer is not None:
        model.module.register_buffer("kept", torch.ones(3).to(buffer))

    def batch_of(step: int) -> dict[str, Tensor]:
        weight = torch.tensor(30.0 if rank == 1 else 5000.0 if (rank, step) == (0, 30) else 1.0)
        return {"x": torch.ones(3, 4) * (1 + 0.1 * rank) + torch.eye(3, 4), "weight": weight}

    return trained(model, 31, weighted, batch_of, detector="v3", replay_every_steps=0)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        dist.all_reduce(gradients[0])
        return gradients[0]


def refused_collectives() -> dict[str, str]:
    """Return what each kind of collective raises under `run_alone`."""
    messages: dict[str, str] = {}

    def tried(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            messages[name] = "none"
        except Exception as error:
            messages[name] = str(error)

    x = torch.ones(2, requires_grad=True)
    loss = _Reduced.apply(x).sum()  # type: ignore[no-untyped-call]
    with run_alone("step_fn", torch.device("cpu")):
        tried("own", lambda: dist.all_reduce(torch.ones(1)))
        tried("backward", lambda: loss.backward())
        thread = threading.Thread(target=tried, args=("thread", lambda: dist.all_reduce(torch.ones(1))))
        thread.start()
        thread.join(30)
    return messages


def with_a_mask(steps: int) -> tuple[ReplayOutcome, int]:
    """Train with a large buffer that is equal on all ranks, beside running statistics that are not; count the bytes."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.BatchNorm1d(4), Small())
    inner.register_buffer("mask", torch.zeros(1 << 20))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    with count_collectives() as seen:
        outcome = trained(model, steps, loss_of, lambda step: torch.randn(3, 4) + dist.get_rank())
    return outcome, seen.bytes_by_op.total()


def compiled_elsewhere() -> ReplayOutcome:
    """Rank 1's gradient is wrong by the last bits once, in a process that compiled something the step does not use."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    x = torch.ones(3, 4) + torch.eye(3, 4) + dist.get_rank()
    return trained(small(), 3, loss_of, lambda step: x, wrong=WrongGradient(1, 1, 1 + 1e-6))
