"""What runs on the ranks of the replicas' tests: DistributedDataParallel as a user trains it, with a fault planted."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._agreement.gather import gather_trees
from ddpstats.errors import InvalidStats
from ddpstats.sentinel import _difference
from ddpstats.sentinel._divergence import Divergence
from ddpstats.sentinel._replicas import Replicas
from tests.threads import lasting_threads

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Net(nn.Module):
    """Dropout, batch norm, a frozen parameter, a buffer of its own, and a branch that a batch need not take."""

    scale: Tensor
    mean: Tensor
    moves_mean = False  # at each forward pass in training mode, each rank by its own batch

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.drop = nn.Dropout(0.3)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        self.branch = nn.Linear(40, 40) if branches else None
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(40))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        if self.moves_mean:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        hidden = self.drop(self.norm(self.first(x))) * self.scale
        hidden = self.middle(hidden)
        if self.branch is not None and takes_branch:
            hidden = hidden + self.branch(hidden)
        found: Tensor = self.last(hidden)
        return found


class Holder(nn.Module):
    """What has DistributedDataParallel inside, as trainers do; its own forward is never called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


@dataclass(frozen=True)
class Flip:
    """One bit of one element on one rank. ``kind``: "parameter", "gradient" (as reduced) or "buffer"."""

    step: int
    rank: int
    kind: str
    name: str
    element: int
    bit: int


@dataclass(frozen=True)
class Plan:
    """How to train.

    ``meddle``: what goes wrong besides: a key of `_MEDDLES`, "other_model", "learning_rate" or "no_copies".
    """

    steps: int = 3
    accumulate: int = 1
    ddp: dict[str, Any] = field(default_factory=dict)
    wrap: str = "ddp"
    branches: bool = False
    dtype: torch.dtype = torch.float32
    flips: Sequence[Flip] = ()
    meddle: str = ""
    ignore: tuple[str, ...] = ()
    compares: bool = True
    expects: bool = True
    pickles: bool = False


def gathering(calls: list[str]) -> Callable[..., dict[int, dict[str, Any]]]:
    """What the sentinel gives to `Replicas.compare`; notes what was gathered."""

    def gathered(make_tree: Callable[[], dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
        calls.append(what)
        return dict(enumerate(gather_trees(make_tree, name=what)))

    return gathered


def train(plan: Plan) -> dict[str, Any]:
    """What the comparison found in each step, and the end of the run, on this rank."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Net(plan.branches).to(plan.dtype)
    if plan.meddle == "other_model" and rank == 1:
        model.extra = nn.Parameter(torch.zeros(3))
    module = _wrapped(model, plan)
    held = Holder(module) if plan.wrap == "holder" else model if plan.wrap == "inner" else module
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if plan.meddle != "learning_rate" or rank != 1 else 0.011)
    torch.manual_seed(100 + rank), random.seed(rank), numpy.random.seed(rank)  # dropout differs between ranks
    threads, hooks = lasting_threads(), _hooks(model)
    replicas = Replicas(held, plan.ignore)
    calls: list[str] = []
    found = [_step(plan, step, model, module, optimizer, replicas, calls) for step in range(plan.steps)]
    replicas.close()
    replicas.close()
    return {
        "found": found,
        "calls": calls,
        "warnings": replicas.warnings,
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "drawn": (random.random(), float(numpy.random.normal()), float(torch.rand(()))),
        "left": (lasting_threads() - threads, _hooks(model) - hooks),
    }


def _wrapped(model: nn.Module, plan: Plan) -> nn.Module:
    if plan.wrap == "alone":
        return model
    if plan.meddle == "ddp_ignores":
        names = ["middle.weight", "scale"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, bucket_cap_mb=0.001, **plan.ddp)


def _step(
    plan: Plan,
    step: int,
    model: nn.Module,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicas: Replicas,
    calls: list[str],
) -> Divergence | None:
    rank = dist.get_rank()
    meddle: Callable[..., None] = _MEDDLES.get(plan.meddle, _nothing)
    meddle("before", step, rank, model, optimizer)
    if plan.meddle == "moved_mean":
        model.moves_mean = True  # type: ignore[assignment]
        with torch.no_grad():
            module(torch.full((4, 6), float(rank), dtype=plan.dtype))
    _flip(plan, step, "buffer", model)
    if plan.expects and plan.compares and not (plan.meddle == "no_copies" and rank == 1):
        replicas.expect()
        if plan.pickles:
            _copied(model)
    for micro in range(plan.accumulate):
        holds_back = isinstance(module, DistributedDataParallel) and micro < plan.accumulate - 1
        with module.no_sync() if holds_back else contextlib.nullcontext():  # type: ignore[operator]
            generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
            batch = torch.randn(4, 6, generator=generator).to(plan.dtype)
            out = module(batch, step % 2 == 1) if plan.branches else module(batch)
            loss: Tensor = out.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
    if plan.wrap == "alone":
        _reduce_by_hand(model)
    _flip(plan, step, "gradient", model)
    _flip(plan, step, "parameter", model)
    meddle("after", step, rank, model, optimizer)
    found = replicas.compare(gathering(calls)) if plan.compares else None
    optimizer.step()
    optimizer.zero_grad()
    return found


def _copied(model: nn.Module) -> None:
    """As trainers do at any time, with the hook in place: neither may fail, or take the hook along."""
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)(torch.zeros(4, 6))


def _reduce_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _flip(plan: Plan, step: int, kind: str, model: nn.Module) -> None:
    for flip in plan.flips:
        if (flip.step, flip.rank, flip.kind) == (step, dist.get_rank(), kind):
            tensor = dict(model.named_buffers() if kind == "buffer" else model.named_parameters())[flip.name]
            raw = tensor.grad if kind == "gradient" else tensor.detach()
            assert raw is not None
            words = raw.view(_INTEGERS[raw.element_size()]).view(-1)
            top = flip.bit == 8 * raw.element_size() - 1
            words[flip.element] ^= -(1 << flip.bit) if top else 1 << flip.bit


def _hooks(model: nn.Module) -> int:
    return sum(len(one._forward_pre_hooks) for one in model.modules())


def _nothing(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    pass


def _noise(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Added to the gradients of one rank after the reduce."""
    if when == "after" and rank == 1 and step == 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += 1e-3 * torch.randn_like(parameter.grad)


def _no_gradient(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if when == "after" and rank == 1 and step == 1:
        model.middle.bias.grad = None


def _nan(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if when == "after":
        model.middle.bias.data[3] = float("nan")


def _zero(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if when == "after" and step == 1:
        model.middle.bias.data[3] = -0.0 if rank == 1 else 0.0


def _own_scale(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if when == "before" and step == 1:
        model.scale.fill_(1 + rank)


def _ddp_ignores(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if when == "before":
        model.scale.fill_(1 + rank)
        model.middle.weight.data.fill_(0.01 * rank)


def _evaluates(when: str, step: int, rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Evaluation between steps, in training mode and on one rank only: its running statistics move."""
    if when == "before" and rank == 1:
        with torch.no_grad():
            model(torch.randn(4, 6))


_MEDDLES: dict[str, Callable[..., None]] = {
    "noise": _noise,
    "no_gradient": _no_gradient,
    "nan": _nan,
    "zero": _zero,
    "own_scale": _own_scale,
    "ddp_ignores": _ddp_ignores,
    "evaluates": _evaluates,
}


# -- models that are no DistributedDataParallel -----------------------------------------------------------------------


def compare_once(build: str) -> dict[str, Any]:
    """One comparison of a model of which only rank 1 may be odd."""
    module = _BUILDS[build](dist.get_rank())
    replicas = Replicas(module)
    calls: list[str] = []
    found = replicas.compare(gathering(calls))
    return {"found": found, "warnings": replicas.warnings, "calls": calls}


def _lazy(rank: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def _half_lazy(rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3))
    if rank == 1:
        model(torch.zeros(2, 2))
    return model


def _sharded(rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(first, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        second.weight[1, 2] += rank == 1
    return nn.Sequential(first, second)


def _sparse(rank: int) -> nn.Module:
    torch.manual_seed(0)
    table = nn.Embedding(50, 4, sparse=True)
    model = nn.Sequential(table)
    loss: Tensor = model(torch.tensor([3, 3, 8])).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = table.weight.grad
    assert gradient is not None
    if rank == 1:
        gradient._values()[0] += 1
    return model


def _strided(rank: int) -> nn.Module:
    """Equal numbers that lie otherwise in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    return model.to(memory_format=torch.channels_last) if rank == 1 else model  # type: ignore[call-overload]


def _large(rank: int) -> nn.Module:
    """Damage late in a tensor that takes two rounds of blocks."""
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(500, 1003))
    if rank == 1:
        model.table.data[417, 1002] = 1e-30
    return model


def _other_shape(rank: int) -> nn.Module:
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(3 if rank == 1 else 2))
    return model


def _other_order(rank: int) -> nn.Module:
    model = nn.Module()
    for name in ["a", "b"] if rank == 1 else ["b", "a"]:
        model.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return model


class Cache(nn.Module):
    """A buffer as long as this rank's batches."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(rows), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def compare_caches() -> Divergence | None:
    replicas = Replicas(model := Cache(3 + dist.get_rank()))
    replicas.expect()
    model(torch.ones(2))
    return replicas.compare(gathering([]))


def fail_on_one_rank(which: str) -> str:
    """Rank 1 cannot flatten, or not split, a tensor that differs: the error of this rank; and all are in step after."""
    model = _large(dist.get_rank())
    before = getattr(_difference, which)
    calls = 0

    def without_memory(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1:
            raise MemoryError("no room for a copy")
        return before(*args)

    setattr(_difference, which, without_memory)
    try:
        Replicas(model).compare(gathering([]))
    except InvalidStats as error:
        found = str(error)
    finally:
        setattr(_difference, which, before)
    assert Replicas(_empty(0)).compare(gathering([])) is None
    return found


def _raising(rank: int) -> nn.Module:
    class Raising(nn.Module):
        looked = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            self.looked += 1
            if self.looked > 1 and rank == 1:  # not at the first look, which is at home
                raise ZeroDivisionError("of the user's own")
            return super().named_parameters(*args, **kwargs)

    return Raising()


def _empty(rank: int) -> nn.Module:
    return nn.Identity()


_BUILDS: dict[str, Callable[[int], nn.Module]] = {
    "lazy": _lazy,
    "half_lazy": _half_lazy,
    "sharded": _sharded,
    "sparse": _sparse,
    "strided": _strided,
    "large": _large,
    "other_shape": _other_shape,
    "other_order": _other_order,
    "raising": _raising,
    "empty": _empty,
}
