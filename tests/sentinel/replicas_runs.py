"""Faults of replicas, and models that are no DistributedDataParallel: what the ranks of `test_replicas` run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._observe.gradients import unwrap
from ddpstats._ranks.gather import gather_trees
from ddpstats.errors import InvalidStats
from ddpstats.sentinel import replicas
from ddpstats.sentinel.replicas import Divergence, ReplicaDigests
from tests.sentinel.sentinel_runs import step_fn

# -- what is done to the model before training ------------------------------------------------------------------------


def freeze(model: nn.Module) -> None:
    model.get_parameter("head.bias").requires_grad_(False)


def extra_parameter_on_rank_1(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def ignored_by_ddp(model: nn.Module) -> None:
    """Make a parameter and a buffer differ, which DistributedDataParallel ignores."""
    names = ["head.bias", "scale"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    model.get_buffer("scale").fill_(1 + dist.get_rank())
    model.get_parameter("head.bias").data.fill_(0.01 * dist.get_rank())


# -- what is done in each step ----------------------------------------------------------------------------------------


def without_forward_on_rank_1(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if dist.get_rank() != 1:
        return step_fn(model, batch)
    zeros = [0 * parameter.sum() for parameter in model.parameters()]
    return torch.stack(zeros).sum()


def after_an_evaluation_of_the_module_inside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Evaluate first: each rank's running statistics are what its last step has made of them."""
    with torch.no_grad():
        unwrap(model).eval()(batch["tokens"])
    return step_fn(model.train(), batch)


def after_a_pass_without_gradients(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run a forward pass that trains nothing first: DistributedDataParallel then broadcasts no buffers."""
    with torch.no_grad():
        model(batch["tokens"])
    return step_fn(model, batch)


def reduce_by_hand(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name != "extra":
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def nan_in_the_last_step(model: nn.Module, step: int) -> None:
    if step == 2:
        model.get_parameter("head.bias").data[3] = float("nan")


def own_scale(model: nn.Module, step: int) -> None:
    if step == 0:
        model.get_buffer("scale").fill_(1 + dist.get_rank())


def no_gradient_on_rank_1(model: nn.Module, step: int) -> None:
    if (step, dist.get_rank()) == (1, 1):
        model.get_parameter("head.bias").grad = None


# -- models that are no DistributedDataParallel -----------------------------------------------------------------------


def gathering(calls: list[str]) -> Callable[..., dict[int, dict[str, Any]]]:
    """Return what the sentinel gives to `ReplicaDigests.compare`, which notes what was gathered."""

    def gathered(make_tree: Callable[[], dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
        calls.append(what)
        return dict(enumerate(gather_trees(make_tree, name=what)))

    return gathered


def compare_once(build: str) -> dict[str, Any]:
    """Compare a model once, of which only that of rank 1 may be odd."""
    module = _BUILDS[build](dist.get_rank())
    replicas = ReplicaDigests(module)
    calls: list[str] = []
    divergence = replicas.compare(gathering(calls))
    return {"divergence": divergence, "warnings": replicas.warnings, "calls": calls}


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
    replicas = ReplicaDigests(model := Cache(3 + dist.get_rank()))
    model(torch.ones(2))
    return replicas.compare(gathering([]))


def no_room_on_rank_1() -> str:
    """Return this rank's error where rank 1 cannot flatten a tensor that differs; all are in step after it."""
    model, text = _large(dist.get_rank()), "none"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(replicas, "flatten_elements", _without_memory)
        try:
            ReplicaDigests(model).compare(gathering([]))
        except InvalidStats as error:
            text = str(error)
    assert ReplicaDigests(nn.Identity()).compare(gathering([])) is None
    return text


def _without_memory(tensor: Tensor) -> Tensor:
    raise MemoryError("no room for a copy")


_BUILDS: dict[str, Callable[[int], nn.Module]] = {
    "half_lazy": _half_lazy,
    "sharded": _sharded,
    "sparse": _sparse,
    "strided": _strided,
    "large": _large,
    "other_order": _other_order,
}
