"""The five errors of TrainCheck's collection (OSDI 2025) that concern ranks, each in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats.guard.group import GuardMode
from tests.training import batch_of, loss_of, make_model, rank

FAULTY_STEP, FAULTY_RANK = 2, 1
Step = Callable[[int], None]
"""Everything of a training step before the optimizer's."""


class SplitLayer(nn.Module):
    """A layer split between the ranks, as in tensor parallelism, behind a norm that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.split = nn.Linear(6, 3)
        nn.init.normal_(self.split.weight, std=1.0 + rank())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.split(self.norm(x))
        return out


def _backward(model: nn.Module, number: int) -> None:
    loss: Any = loss_of(model, batch_of(number))
    loss.backward()


def clipped_apart(broken: bool) -> tuple[nn.Module, Step]:
    """DeepSpeed 1801, which BLOOM-176B met: gradients that ranks share are clipped by a norm of each rank's own."""
    model = SplitLayer()
    shared = list(model.norm.parameters())

    def step(number: int) -> None:
        _backward(model, number)
        for parameter in shared:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        clipped = model.parameters() if broken and number >= FAULTY_STEP else shared
        nn.utils.clip_grad_norm_(clipped, 0.01)

    return model, step


def hooks_lost(broken: bool) -> tuple[nn.Module, Step]:
    """PyTorch 104336: a model that is moved away and back after it was wrapped has lost the hooks of DDP."""
    ddp = DistributedDataParallel(make_model())

    def step(number: int) -> None:
        if broken and number == FAULTY_STEP:
            ddp.double()
            ddp.float()
        _backward(ddp, number)

    return ddp, step


def sometimes_wrapped(broken: bool) -> tuple[nn.Module, Step]:
    """jxmnop's: a trainer's model is sometimes wrapped in DDP, and sometimes the module itself is called."""
    model = make_model()
    ddp = DistributedDataParallel(model)

    def step(number: int) -> None:
        called = model if broken and number == FAULTY_STEP else ddp
        _backward(called, number)

    return model, step


def result_lost(broken: bool) -> tuple[nn.Module, Step]:
    """PyTorch 84803 and 96600, Baichuan2 86: what arrives at one rank is zeros, without an error."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)

    def step(number: int) -> None:
        _backward(model, number)
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            if broken and number == FAULTY_STEP and rank() == FAULTY_RANK:
                parameter.grad.zero_()

    return model, step


def without_tokens(broken: bool) -> tuple[nn.Module, Step]:
    """DeepSpeed 5794: a rank whose experts get no tokens leaves out an exchange of the mixture."""
    ddp = DistributedDataParallel(make_model())

    def step(number: int) -> None:
        tokens = torch.ones(0 if broken and number == FAULTY_STEP and rank() == FAULTY_RANK else 4)
        if tokens.numel():
            dist.all_to_all_single(torch.empty_like(tokens), tokens)  # ddpstats: ignore[data-branch]
        _backward(ddp, number)

    return ddp, step


ERRORS = {make.__name__: make for make in (clipped_apart, hooks_lost, sometimes_wrapped, result_lost, without_tokens)}


def train(error: str, broken: bool, checks: GuardMode | Literal["sentinel"]) -> tuple[int, str] | None:
    """Train four steps under a guard's mode, or a sentinel that compares replicas; return which step raised what."""
    model, step = ERRORS[error](broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = None
    if checks == "sentinel":
        sharded = ["split.*"] if isinstance(model, SplitLayer) else []
        sentinel = ddpstats.Sentinel(model, mode=2, digest_every_steps=1, ignore=sharded)
    number = 0
    try:
        with ddpstats.collective_guard("off" if checks == "sentinel" else checks, timeout_sec=30) as guard:
            for number in range(4):
                step(number)
                if sentinel is not None:
                    sentinel.step()
                guard.step()
                optimizer.step()
                optimizer.zero_grad()
    except ddpstats.DdpstatsError as raised:
        return number, f"{type(raised).__name__}: {raised}"
    return None
