"""Functions that run on the ranks of the replicas' tests: DDP in the shared loop, with a fault planted."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._ranks.gather import gather_trees
from ddpstats.errors import InvalidStats
from ddpstats.sentinel import replicas
from ddpstats.sentinel.replicas import Divergence, Replicas
from tests import training
from tests.threads import lasting_threads

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Net(nn.Module):
    """A model with dropout, batch norm, a frozen parameter and two buffers."""

    scale: Tensor
    mean: Tensor
    moves_mean = False  # at each forward pass in training mode, each rank by its own batch

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.drop = nn.Dropout(0.3)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(40))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.moves_mean:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        hidden = self.drop(self.norm(self.first(x))) * self.scale
        out: Tensor = self.last(self.middle(hidden))
        return out


class Holder(nn.Module):
    """A module with DistributedDataParallel inside, as trainers have it; its own forward is never called."""

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
    micro_batches: int = 1
    ddp: dict[str, Any] = field(default_factory=dict)
    wrap: str = "ddp"
    dtype: torch.dtype = torch.float32
    flips: Sequence[Flip] = ()
    meddle: str = ""
    ignore: tuple[str, ...] = ()
    expects: bool = True
    pickles: bool = False


def gathering(calls: list[str]) -> Callable[..., dict[int, dict[str, Any]]]:
    """Return what the sentinel gives to `Replicas.compare`, which notes what was gathered."""

    def gathered(make_tree: Callable[[], dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
        calls.append(what)
        return dict(enumerate(gather_trees(make_tree, name=what)))

    return gathered


def train(plan: Plan) -> dict[str, Any]:
    """Return what the comparison found in each step, and what it left behind on this rank."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Net().to(plan.dtype)
    if plan.meddle == "other_model" and rank == 1:
        model.extra = nn.Parameter(torch.zeros(3))
    module = _wrapped(model, plan)
    holder = Holder(module) if plan.wrap == "holder" else model if plan.wrap == "inner" else module
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if plan.meddle != "learning_rate" or rank != 1 else 0.011)
    threads, hooks = lasting_threads(), _hooks(model)
    replicas = Replicas(holder, plan.ignore)
    calls: list[str] = []
    divergences: list[Divergence | None] = []

    def begin(step: int, micro: int) -> training.Batch:
        if micro == 0:
            _meddle("before", plan, step, model)
            if plan.meddle == "moved_mean":
                model.moves_mean = True
                with torch.no_grad():
                    module(torch.full((4, 6), float(rank), dtype=plan.dtype))
            _flip(plan, step, "buffer", model)
            if plan.expects and not (plan.meddle == "no_copies" and rank == 1):
                replicas.expect()
                if plan.pickles:
                    _copied(model)
        return training.batch_of(step, micro)

    def loss_of(module: nn.Module, batch: training.Batch) -> Tensor:
        loss: Tensor = module(batch["x"].to(plan.dtype)).square().mean()
        return loss

    def judge(step: int) -> bool:
        if plan.wrap == "alone":
            _reduce_by_hand(model)
        _flip(plan, step, "gradient", model)
        _flip(plan, step, "parameter", model)
        _meddle("after", plan, step, model)
        divergences.append(replicas.compare(gathering(calls)))
        return True

    training.train(
        module,
        plan.steps,
        plan.micro_batches,
        batch_of=begin,
        loss_of=loss_of,
        optimizer=optimizer,
        hooks=training.Hooks(judge=judge),
    )
    replicas.close()
    replicas.close()
    return {
        "divergences": divergences,
        "calls": calls,
        "warnings": replicas.warnings,
        "left": (lasting_threads() - threads, _hooks(model) - hooks),
    }


def _wrapped(model: nn.Module, plan: Plan) -> nn.Module:
    if plan.wrap == "alone":
        return model
    if plan.meddle == "ddp_ignores":
        names = ["middle.weight", "scale"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, bucket_cap_mb=0.001, **plan.ddp)


def _copied(model: nn.Module) -> None:
    """Save and copy as trainers do at any time: with the hook in place, neither may fail or take the hook along."""
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
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def _noise(model: Net, rank: int) -> None:
    """Add noise to the gradients, after the reduce."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 1e-3 * torch.randn_like(parameter.grad)


def _no_gradient(model: Net, rank: int) -> None:
    model.middle.bias.grad = None


def _nan(model: Net, rank: int) -> None:
    model.middle.bias.data[3] = float("nan")


def _own_scale(model: Net, rank: int) -> None:
    model.scale.fill_(1 + rank)


def _own_weight(model: Net, rank: int) -> None:
    model.scale.fill_(1 + rank)
    model.middle.weight.data.fill_(0.01 * rank)


def _evaluate(model: Net, rank: int) -> None:
    """Evaluate in training mode, where running statistics move."""
    with torch.no_grad():
        model(torch.randn(4, 6))


_MEDDLES: dict[tuple[str, str], tuple[Callable[[Net, int], None], Sequence[int], Sequence[int]]] = {
    ("after", "noise"): (_noise, (1,), (1,)),
    ("after", "no_gradient"): (_no_gradient, (1,), (1,)),
    ("after", "nan"): (_nan, (0, 1, 2), (0, 1)),
    ("before", "own_scale"): (_own_scale, (1,), (0, 1)),
    ("before", "ddp_ignores"): (_own_weight, (0,), (0, 1)),
    ("before", "evaluates"): (_evaluate, (0, 1, 2), (1,)),
}
"""When in a step, and what: the function, the steps, and the ranks."""


def _meddle(when: str, plan: Plan, step: int, model: Net) -> None:
    if (when, plan.meddle) in _MEDDLES:
        function, steps, ranks = _MEDDLES[when, plan.meddle]
        if step in steps and dist.get_rank() in ranks:
            function(model, dist.get_rank())


# -- models that are no DistributedDataParallel -----------------------------------------------------------------------


def compare_once(build: str) -> dict[str, Any]:
    """Compare a model once, of which only that of rank 1 may be odd."""
    module = _BUILDS[build](dist.get_rank())
    replicas = Replicas(module)
    calls: list[str] = []
    divergence = replicas.compare(gathering(calls))
    return {"divergence": divergence, "warnings": replicas.warnings, "calls": calls}


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
    """Return equal numbers, in another order of memory on rank 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    return model.to(memory_format=torch.channels_last) if rank == 1 else model  # type: ignore[call-overload]


def _large(rank: int) -> nn.Module:
    """Return a tensor that takes two rounds of blocks, with damage late in it on rank 1."""
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
    """A module with a buffer as long as this rank's batches."""

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


def no_room_on_rank_1() -> str:
    """Return this rank's error where rank 1 cannot flatten a tensor that differs; all are in step after it."""
    model, text = _large(dist.get_rank()), "none"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(replicas, "flatten_elements", _without_memory)
        try:
            Replicas(model).compare(gathering([]))
        except InvalidStats as error:
            text = str(error)
    assert Replicas(_empty(0)).compare(gathering([])) is None
    return text


def _without_memory(tensor: Tensor) -> Tensor:
    raise MemoryError("no room for a copy")


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
