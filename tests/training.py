"""A small model, its batches, and the training loop that the tests of all rooms run on their ranks."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

Batch = dict[str, Tensor]


def rank() -> int:
    """Return this rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    """Six numbers to three: a norm, dropout, a buffer that changes in the forward pass."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.LayerNorm(width)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(width, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("mean").mul_(0.9).add_(x.detach().mean(0))
        out: Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return out


def make_model(width: int = 8) -> Net:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return Net(width)


def batch_of(step: int, micro: int = 0) -> Batch:
    """Return this rank's batch of 4 samples, which differs by step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank() + micro)
    return {"x": torch.randn(4, 6, generator=generator), "y": torch.randn(4, 3, generator=generator)}


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (module(batch["x"]) - batch["y"]).square().mean()
    return loss


class Foreign(Tensor):
    """A tensor that holds another one, as of a library that quantizes: it owns no memory."""

    content: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Foreign:
        made: Foreign = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.content = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = tree_map_only(Foreign, lambda tensor: tensor.content, args)
        return tree_map_only(Tensor, Foreign, function(*args, **(kwargs or {})))


def tensor_of_kind(kind: Any, value: float = 1.0) -> Tensor:
    """Return three times ``value`` in a dtype, or as `Foreign` for "foreign"."""
    values = torch.full((3,), value)
    return Foreign(values) if kind == "foreign" else values.to(kind)


@dataclass
class Hooks:
    """The functions that a test has called in the loop. ``judge`` returns whether to take the optimizer step."""

    micro_batch: Callable[[Batch], contextlib.AbstractContextManager[Any]] = lambda batch: contextlib.nullcontext()
    after_backward: Callable[[int], None] = lambda step: None
    judge: Callable[[int], bool] = lambda step: True
    after_step: Callable[[int], None] = lambda step: None


@dataclass
class Trained:
    """The end of a run on one rank. ``drawn`` is what its three random generators give next."""

    losses: list[float]
    parameters: list[Tensor]
    buffers: list[Tensor]
    drawn: tuple[float, float, float]


def train(
    module: nn.Module,
    steps: int = 3,
    micro_batches: int = 1,
    *,
    batch_of: Callable[[int, int], Batch] = batch_of,
    loss_of: Callable[[nn.Module, Batch], Tensor] = loss_of,
    optimizer: torch.optim.Optimizer | None = None,
    hooks: Hooks | None = None,
) -> Trained:
    """Train ``module``, DDP or not, with gradient accumulation. Every rank must call."""
    optimizer, hooks = optimizer or torch.optim.SGD(module.parameters(), lr=0.05), hooks or Hooks()
    seed(100 + rank())
    losses = []
    for step in range(steps):
        for micro in range(micro_batches):
            batch = batch_of(step, micro)
            with syncing(module, micro == micro_batches - 1), hooks.micro_batch(batch):
                loss = loss_of(module, batch)
                loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        hooks.after_backward(step)
        if hooks.judge(step):
            optimizer.step()
        hooks.after_step(step)
        optimizer.zero_grad()
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    return Trained(losses, parameters, [buffer.clone() for buffer in module.buffers()], draw())


def syncing(module: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return DDP's ``no_sync()`` for micro-batches before the last."""
    if is_last or not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    held: contextlib.AbstractContextManager[Any] = module.no_sync()
    return held


def seed(number: int) -> None:
    """Seed the three random generators of the process."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def draw() -> tuple[float, float, float]:
    """Draw a number from each random generator of the process."""
    return random.random(), float(numpy.random.normal()), float(torch.rand(()))


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Yield the list of messages that ddpstats logs in the block."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("ddpstats"), Listener(level)
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(min(level, before or level))
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
