"""Models whose embeddings have sparse gradients: what `test_sparse` and the dump's tests run on the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import ConfigError, Sentinel, SentinelAlarm
from ddpstats.capture import CaptureVerdict
from tests.capture.capture_runs import captured
from tests.training import Hooks, rank, train

_ROWS = 20


class Table(nn.Module):
    """Words that come more than once in a batch: their gradients have several parts of one row."""

    def __init__(self, bag: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table = kind(_ROWS, 6, sparse=True)
        self.bag, self.norm, self.last = bag, nn.LayerNorm(6), nn.Linear(6, 2)
        self.drop = nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.table(words)
        mean = rows if self.bag else rows.mean(1)
        out: Tensor = self.last(self.drop(self.norm(mean)))
        return out


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Table()


def step(module: nn.Module, batch: Any) -> Tensor:
    out = module(batch["words"])
    return (out * batch["factor"]).square().sum()  # type: ignore[no-any-return]


def batch_of(number: int, micro: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * number + rank())
    return {"words": torch.randint(0, _ROWS, (6, 5), generator=generator), "factor": torch.ones(())}


def made(case: str) -> nn.Module:
    torch.manual_seed(0)
    model = Table("bag" in case, 0.3 if "dropout" in case else 0.0)
    if "alone" in case:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view="view" in case, bucket_cap_mb=0.0002)


def _reduce(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        dist.all_reduce(parameter.grad)


def watched_by_a_sentinel(case: str, flips: bool = False) -> list[tuple[int, ...]]:
    """Return the culprits of each step, of a sentinel whose layers look at every step.

    ``flips``: rank 1's gradient of the table is wrong in the third step, and not when the step is replayed.
    """
    module = made(case)
    table: Any = module.get_submodule("table" if "alone" in case else "module.table")
    culprits, handles = [], []
    with Sentinel(module, mode=2, digest_every_steps=1, replay_every_steps=1, replay_fn=step) as sentinel:

        def prepared(number: int, micro: int) -> dict[str, Any]:
            if "dense zeros" in case:
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            if flips and number == 2 and rank() == 1:
                handles.append(table.weight.register_hook(lambda gradient: gradient * 1.0001))
            return batch_of(number)

        def judge(number: int) -> bool:
            for handle in handles:
                handle.remove()
            if "alone" in case:
                _reduce(module)
            try:
                culprits.append(tuple(sentinel.step().culprit_ranks))
            except SentinelAlarm as alarm:
                culprits.append(tuple(alarm.culprit_ranks))
            return True

        train(module, batch_of=prepared, loss_of=step, hooks=Hooks(sentinel.micro_batch, judge=judge))
    return culprits


def refused(negative: bool) -> str:
    """Give a ``replay_fn`` that takes other rows of the table, all of which are equal, or another sign."""
    module = made("ddp")
    nn.init.constant_(module.get_parameter("module.table.weight"), 0.5)

    def other_step(module: nn.Module, batch: Any) -> Tensor:
        words = batch["words"] if negative else (batch["words"] + 1) % _ROWS
        return step(module, {**batch, "words": words}) * (-1 if negative else 1)

    with Sentinel(module, mode=2, replay_every_steps=1, replay_fn=other_step) as sentinel:
        try:
            hooks = Hooks(sentinel.micro_batch, judge=lambda number: sentinel.step().ok)
            train(module, 1, batch_of=batch_of, loss_of=step, hooks=hooks)
        except ConfigError as error:
            return str(error)
    return "taken"


def captured_case(case: str, bad_step: int, dirpath: str, **options: Any) -> list[CaptureVerdict]:
    """Train with a NaN on rank 1 in the ``bad_step``-th step."""
    module = made(case)

    def planted(number: int, micro: int) -> dict[str, Any]:
        factor = {"factor": torch.tensor(torch.nan)} if (number, rank()) == (bad_step, 1) else {}
        return batch_of(number) | factor

    def after_backward(number: int) -> None:
        if "alone" in case:
            _reduce(module)

    return captured(
        dirpath,
        module,
        batch_of=planted,
        loss_of=step,
        after_backward=after_backward,
        on_nonfinite="skip",
        **options,
    ).verdicts


def captured_with_cause(dirpath: str) -> list[CaptureVerdict]:
    return captured_case("ddp", 1, dirpath, attribute=True, step_fn=step)


def overflowing_parts(dirpath: str) -> CaptureVerdict:
    """Train a step in which each part of a row is finite on rank 1, and their sum is not."""
    module = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    factor = 3e38 if rank() == 1 else 1.0
    return captured(
        dirpath,
        module,
        1,
        batch_of=lambda number, micro: {"words": torch.tensor([1, 1])},
        loss_of=lambda module, batch: (module(batch["words"]) * factor).sum(),
    ).verdicts[0]
