"""A model that rounds otherwise where it is compiled, on rank 1: the ranks of `test_compiled_replay` run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel
from tests.sentinel.replay_runs import ReplayOutcome, Small, WrongGradient, trained, weighted

_ROWS = 3  # of rank 0's batch; each further rank has one more


class Rounding(Small):
    """A model that rounds as Inductor's do, for the shape of rank 1's batch alone; so no C++ compiler is needed."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.shape[0] == _ROWS + 1:
            x = x * 3 / 3
        return super().forward(x)


@dataclass
class Program:
    """Four steps, each of which is replayed.

    Attributes:
        zero_ranks: whose loss is 0, from step 0 until before the step ``zero_until``.
        compiled_from: the step from which on the module around DDP is compiled.
        compiled_ranks: on which the module inside of it is, from the first step on.
        fault: (rank, step): there a gradient is wrong, once.
        factor_from: the step from which on the loss has a factor that replay_fn does not know.
    """

    zero_ranks: tuple[int, ...] = ()
    zero_until: int = 4
    compiled_from: int = 4
    compiled_ranks: tuple[int, ...] = ()
    fault: tuple[int, int] = (-1, -1)
    factor_from: int = 4


def run(program: Program) -> ReplayOutcome:
    """Every rank must call."""
    torch.manual_seed(0)
    model, rank = DistributedDataParallel(Rounding()), dist.get_rank()
    if rank in program.compiled_ranks:
        model.module.compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    wrong = WrongGradient(*program.fault, factor=0.5)

    def step(number: int, sentinel: Sentinel) -> None:
        model.zero_grad()
        torch.manual_seed(100 * number + rank)
        is_zero = rank in program.zero_ranks and number < program.zero_until
        batch = {"x": torch.randn(_ROWS + rank, 4), "weight": torch.tensor(0.0 if is_zero else 1.0)}
        called: nn.Module = compiled if number >= program.compiled_from else model  # type: ignore[assignment]
        with wrong.applied(model, number), sentinel.micro_batch(batch):
            loss = weighted(called, batch) * (1.5 if number >= program.factor_from else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]

    return trained(model, 4, weighted, lambda number: None, run=step)
