"""Models whose embeddings have sparse gradients, on the ranks of `test_sparse` here and in tests/sentinel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import ConfigError, NaNCapture, Sentinel, SentinelAlarm
from ddpstats.capture import CaptureVerdict

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


def other_step(module: nn.Module, batch: Any) -> Tensor:
    """Of other words: the same values in other rows of the table, where these are alike."""
    return step(module, {**batch, "words": (batch["words"] + 1) % _ROWS})


def negative_step(module: nn.Module, batch: Any) -> Tensor:
    return -step(module, batch)


def batch_of(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return {"words": torch.randint(0, _ROWS, (6, 5), generator=generator), "factor": torch.ones(())}


def made(case: str) -> nn.Module:
    torch.manual_seed(0)
    model = Table("bag" in case, 0.3 if "dropout" in case else 0.0)
    if "alone" in case:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view="view" in case, bucket_cap_mb=0.0002)


def watched_by_a_sentinel(case: str, flips: bool = False) -> list[tuple[int, ...]]:
    """The culprits of each step, of a sentinel whose layers look at every step."""
    module = made(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    culprits = []
    table = module.get_submodule("module.table" if "alone" not in case else "table")
    with Sentinel(module, mode=2, digest_every_steps=1, replay_every_steps=1, replay_fn=step) as sentinel:
        for number in range(3):
            batch = batch_of(number)
            if "dense zeros" in case:
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            if flips and number == 2 and dist.get_rank() == 1:
                handle = table.weight.register_hook(lambda gradient: gradient * 1.0001)  # type: ignore[operator]
            with sentinel.micro_batch(batch):
                step(module, batch).backward()  # type: ignore[no-untyped-call]
            if flips and number == 2 and dist.get_rank() == 1:
                handle.remove()
            if "alone" in case:
                _reduce(module)
            try:
                culprits.append(sentinel.step().culprit_ranks)
            except SentinelAlarm as alarm:
                culprits.append(tuple(alarm.culprit_ranks))
            optimizer.step()
            optimizer.zero_grad()
    return culprits


def refused(negative: bool) -> str:
    """A ``replay_fn`` that is another step in the rows alone, all of which are alike; or in the sign alone."""
    module = made("ddp")
    table = module.get_submodule("module.table")
    nn.init.constant_(table.weight, 0.5)  # type: ignore[arg-type]
    function = negative_step if negative else other_step
    with Sentinel(module, mode=2, replay_every_steps=1, replay_fn=function) as sentinel:
        batch = batch_of(0)
        with sentinel.micro_batch(batch):
            step(module, batch).backward()  # type: ignore[no-untyped-call]
        try:
            sentinel.step()
        except ConfigError as error:
            return str(error)
    return "taken"


def _reduce(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        dist.all_reduce(parameter.grad)


def captured(case: str, bad_step: int, dirpath: str, attribute: bool = False) -> list[CaptureVerdict]:
    """A NaN on rank 1 in the ``bad_step``-th step."""
    module = made(case)
    verdicts = []
    options: dict[str, Any] = {"attribute": True, "step_fn": step} if attribute else {}
    with NaNCapture(dirpath, model=module, on_nonfinite="skip", **options) as capture:
        for number in range(3):
            batch = batch_of(number)
            if number == bad_step and dist.get_rank() == 1:
                batch["factor"] = torch.tensor(torch.nan)
            with capture.micro_batch(batch) as kept:
                kept.loss = step(module, batch)
                kept.loss.backward()  # type: ignore[no-untyped-call]
            if "alone" in case:
                _reduce(module)
            verdicts.append(capture.check())
            module.zero_grad()
    return verdicts


def overflowing_parts(dirpath: str) -> list[CaptureVerdict]:
    """Each part of a row is finite on rank 1, and their sum is not."""
    module = nn.Embedding(3, 2, sparse=True)
    ddp = DistributedDataParallel(module)
    with NaNCapture(dirpath, model=ddp) as capture:
        with capture.micro_batch(None):
            factor = 3e38 if dist.get_rank() == 1 else 1.0
            (ddp(torch.tensor([1, 1])) * factor).sum().backward()
        return [capture.check()]
