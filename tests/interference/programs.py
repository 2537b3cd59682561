"""Training programs of all kinds, as their authors would write them; only ``watch`` knows whether ours runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

from tests.interference.watching import Watch

Batch = dict[str, Tensor]
LossOf = Callable[[nn.Module, Batch], Tensor]
NAN_STEP = 2
_WORDS, _WIDTH = 20, 8


@dataclass
class Part:
    """A module as it is trained. ``sentinel``: which layers of the sentinel its kind allows, beside the first."""

    module: nn.Module
    optimizers: Sequence[Optimizer]
    loss_of: LossOf | None = None
    sentinel: dict[str, Any] = field(default_factory=lambda: {"digest_every_steps": 3})


@dataclass
class Program:
    """``step(watch, number)`` is one training step; it returns the loss."""

    parts: Sequence[Part]
    step: Callable[[Watch, int], Tensor]


class Net(nn.Module):
    """Norms, buffers that change in the forward pass, and dropout."""

    def __init__(self, dropout: float = 0.1, reentrant: bool | None = None, out: int = 4) -> None:
        super().__init__()
        self.first, self.batch = nn.Linear(_WIDTH, 16), nn.BatchNorm1d(16)
        self.middle = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout))
        self.last, self.reentrant = nn.Linear(16, out), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch(self.first(x))
        x = x + (self.middle(x) if self.reentrant is None else self._again(x))
        return cast("Tensor", self.last(x))

    def _again(self, x: Tensor) -> Tensor:
        return cast("Tensor", checkpoint(self.middle, x, use_reentrant=self.reentrant))


class Branching(Net):
    """A `Net` that takes a further branch for some batches only; a norm's output is changed in place in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            normed = self.norm(x)
            normed += x
            x = self.branch(normed)
        return super().forward(x)


class Words(nn.Module):
    """A table of words, and a layer that guesses a word: sparse gradients, or one tensor for both."""

    def __init__(self, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(_WORDS, _WIDTH, sparse=sparse), nn.LayerNorm(_WIDTH)
        self.drop, self.guess = nn.Dropout(0.1), nn.Linear(_WIDTH, _WORDS, bias=False)
        if tied:
            self.guess.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return cast("Tensor", self.guess(self.drop(self.norm(self.table(words)))))


def batch_of(number: int) -> Batch:
    """Drawn from all three of the process's generators. NaN on rank 1 in `NAN_STEP`."""
    bad = number == NAN_STEP and dist.get_rank() == 1
    shift = random.random() + float(np.random.rand())
    return {
        "x": torch.randn(6, _WIDTH) + shift,
        "words": torch.randint(0, _WORDS, (6, 5)),
        "factor": torch.tensor(torch.nan if bad else 1.0),
    }


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    made: Tensor = module(batch["x"]) * batch["factor"]
    return made.square().mean()


def loss_of_words(module: nn.Module, batch: Batch) -> Tensor:
    guessed = module(batch["words"][:, :-1]) * batch["factor"]
    return nn.functional.cross_entropy(guessed.flatten(0, 1), batch["words"][:, 1:].flatten())


def loss_in_bfloat16(module: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(batch["x"].device.type, dtype=torch.bfloat16):
        return loss_of(module, batch).float()


def trained(
    part: Part, micro_batches: int = 1, synced: Callable[[bool], Any] | None = None, reduce: bool = False
) -> Program:
    """The usual loop. ``synced(is_last)`` gives a context for each backward pass; ``reduce``: gradients, by itself."""
    loss_fn, holds = part.loss_of, synced or (lambda _: contextlib.nullcontext())
    assert loss_fn is not None

    def step(watch: Watch, number: int) -> Tensor:
        total = torch.zeros(())
        for micro in range(micro_batches):
            batch = batch_of(number)
            with watch.micro_batch(0, batch), holds(micro == micro_batches - 1):
                loss = loss_fn(part.module, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if reduce:
            for parameter in part.module.parameters():
                dist.all_reduce(parameter.grad)
        watch.judge(0, number)
        if number != NAN_STEP:
            dense = [parameter for parameter in part.module.parameters() if _is_dense(parameter)]
            nn.utils.clip_grad_norm_(dense, 1.0)
            for optimizer in part.optimizers:
                optimizer.step()
        part.module.zero_grad()
        return total

    return Program([part], step)


def _is_dense(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and not parameter.grad.is_sparse


def _ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


def _full(loss_fn: LossOf) -> dict[str, Any]:
    """All four layers of the sentinel."""
    return {"digest_every_steps": 3, "replay_every_steps": 4, "replay_fn": loss_fn, "matmul_checksum": True}


def _sgd(module: nn.Module, loss_fn: LossOf = loss_of, **sentinel: Any) -> Part:
    optimizer = SGD(module.parameters(), lr=0.05, momentum=0.9)
    return Part(module, [optimizer], loss_fn, {**_full(loss_fn), **sentinel})


def ddp() -> Program:
    return trained(_sgd(_ddp(Net())))


def ddp_with_options() -> Program:
    module = _ddp(Net(), gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    module.register_comm_hook(None, fp16_compress_hook)
    return trained(_sgd(module))


def static_graph() -> Program:
    return trained(_sgd(_ddp(Net(), static_graph=True), mode=3, detector="v3"))


def unused_parameters() -> Program:
    return trained(_sgd(_ddp(Branching(), find_unused_parameters=True)))


def accumulation() -> Program:
    """Each backward pass reduces."""
    return trained(_sgd(_ddp(Net())), micro_batches=3)


def no_sync() -> Program:
    module = _ddp(Net())
    return trained(_sgd(module), 3, lambda is_last: contextlib.nullcontext() if is_last else module.no_sync())


def own_reduction() -> Program:
    return trained(_sgd(Net()), 2, reduce=True)


def hooks_that_reduce() -> Program:
    """A frozen parameter, and a part in eval mode."""

    def mean_of(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    module = Net()
    module.batch.eval()
    module.last.bias.requires_grad_(False)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(mean_of)  # type: ignore[no-untyped-call]
    return trained(_sgd(module, replay_every_steps=0, replay_fn=None))


def fsdp2() -> Program:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = Net()
    mesh = init_device_mesh(module.last.weight.device.type, (dist.get_world_size(),))
    for layer in (module.first, module.middle, module):
        fully_shard(layer, mesh=mesh)
    sharded: Any = module

    def synced(is_last: bool) -> Any:
        sharded.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    part = Part(module, [AdamW(module.parameters(), lr=1e-2)], loss_of, {"matmul_checksum": True})
    return trained(part, 2, synced)


def autocast() -> Program:
    return trained(_sgd(_ddp(Net()), loss_in_bfloat16), 2)


def checkpointing() -> Program:
    return trained(_sgd(_ddp(Net(reentrant=False))))


def reentrant_checkpointing() -> Program:
    return trained(_sgd(_ddp(Net(reentrant=True)), replay_every_steps=0, replay_fn=None))


def sparse_embedding() -> Program:
    module = _ddp(Words(sparse=True))
    dense = [parameter for name, parameter in module.named_parameters() if "table" not in name]
    table = module.module.get_submodule("table")
    optimizers: list[Optimizer] = [SparseAdam(table.parameters(), lr=1e-2), Adam(dense, lr=1e-2)]
    return trained(Part(module, optimizers, loss_of_words, _full(loss_of_words)))


def tied_parameters() -> Program:
    return trained(_sgd(_ddp(Words(tied=True)), loss_of_words))


def compiled() -> Program:
    return trained(_sgd(_compile(_ddp(Net()))), 2)


def compiled_inside_ddp() -> Program:
    return trained(_sgd(_ddp(_compile(Net()))))


def compiled_in_place() -> Program:
    module = Net()
    module.compile(backend=backend)
    return trained(_sgd(_ddp(module)))


backend = "aot_eager"
"""Of torch.compile. With "inductor" there would be seconds of a C++ compiler in each test."""


def _compile(module: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(module, backend=backend))


def lbfgs() -> Program:
    module = _ddp(Net(dropout=0.0))
    optimizer = LBFGS(module.parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
    part = Part(module, [optimizer], loss_of, _full(loss_of))

    def step(watch: Watch, number: int) -> Tensor:
        batch = {**batch_of(number), "factor": torch.ones(())}

        def closure() -> float:
            optimizer.zero_grad()
            with watch.micro_batch(0, batch):
                loss = loss_of(module, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach().clone()
            dist.all_reduce(total)
            watch.judge(0, -1)
            return float(total)

        return torch.tensor(optimizer.step(closure))  # type: ignore[no-untyped-call]

    return Program([part], step)


def two_optimizers() -> Program:
    """A generator and its critic, in turn; the generator's step leaves gradients in the critic, too."""
    nets = _ddp(Net(out=_WIDTH)), _ddp(Net(out=1))
    parts = [Part(net, [Adam(net.parameters(), lr=1e-3)]) for net in nets]

    def step(watch: Watch, number: int) -> Tensor:
        total, batch = torch.zeros(()), batch_of(number)
        for turn in (1, 0):
            made = nets[0](torch.randn(6, _WIDTH))
            with watch.micro_batch(turn, batch):
                if turn:
                    scores = nets[1](torch.cat([batch["x"] * batch["factor"], made.detach()]))
                    loss = torch.relu(1 - scores[:6]).mean() + torch.relu(1 + scores[6:]).mean()
                else:
                    loss = -nets[1](made).mean() * batch["factor"]
                loss.backward()  # type: ignore[no-untyped-call]
            watch.judge(turn, number)
            if number != NAN_STEP:
                parts[turn].optimizers[0].step()
            for net in nets:
                net.zero_grad()
            total += loss.detach()
        return total

    return Program(parts, step)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "DDP": ddp,
    "DDP with a bucket view and a communication hook": ddp_with_options,
    "DDP with a static graph, the sentinel in mode 3 with detector v3": static_graph,
    "DDP with unused parameters": unused_parameters,
    "accumulation": accumulation,
    "no_sync": no_sync,
    "no DDP, gradients reduced by the program": own_reduction,
    "no DDP, gradients reduced in hooks": hooks_that_reduce,
    "FSDP2": fsdp2,
    "autocast to bfloat16": autocast,
    "activation checkpointing": checkpointing,
    "activation checkpointing, reentrant": reentrant_checkpointing,
    "sparse embedding, two optimizers": sparse_embedding,
    "tied parameters": tied_parameters,
    "torch.compile of DDP": compiled,
    "torch.compile inside of DDP": compiled_inside_ddp,
    "torch.compile in place": compiled_in_place,
    "LBFGS with closures": lbfgs,
    "two models and two optimizers": two_optimizers,
}
