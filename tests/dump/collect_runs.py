"""Programs and ranks whose steps a dump collects."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats.dump import StatsDump
from tests.capture import sparse_runs
from tests.dump.collecting import batch, make_model


def one_step(path: str, changed_rank: int | None = None) -> None:
    """Dump a step under DDP, each rank with its own data; one rank's copy of a weight may be wrong."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(make_model())
    if rank == changed_rank:
        with torch.no_grad():
            model.module.get_parameter("1.linear.weight")[0, 0] += 1
    dump = StatsDump({"dump_path": path, "level": "mix"}, model=model)
    with dump:
        model(batch(rank)).square().sum().backward()
        torch.distributed.all_reduce(torch.tensor([float(rank)]))
    dump.step()


def good_and_bad(path: str) -> None:
    one_step(str(Path(path) / "good"))
    one_step(str(Path(path) / "bad"), changed_rank=1)


def train_sharded(path: str) -> list[float]:
    """Run two backward passes of FSDP2 in one step; return the norm of this rank's shard of a gradient after each."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    norms = []
    dump = StatsDump({"dump_path": path, "level": "L0"}, model=model)
    with dump:
        for number in range(2):
            model(batch(number)).square().sum().backward()
            gradient: Any = model.get_parameter("3.weight").grad
            norms.append(gradient.to_local().norm().item())
    dump.step()
    return norms


def train_in_tensor_parallel(path: str) -> list[float]:
    """Run two backward passes over a layer split between the ranks; return the norm of each one's own gradient."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    sums: list[Any] = [torch.zeros(())]
    with StatsDump({"dump_path": path, "level": "L0"}, model=model) as dump:
        for number in range(2):
            model(batch(number)).square().sum().backward()
            gradient: Any = model.weight.grad
            sums.append(gradient.to_local().clone())
    dump.step()
    return [(after - before).norm().item() for before, after in itertools.pairwise(sums)]


def sparse_gradients(dump_path: str) -> None:
    """Dump a step of DDP whose embedding has sparse gradients, with its tensors."""
    module: nn.Module = sparse_runs.made("ddp")
    config = {"task": "tensor", "dump_path": dump_path, "rank": [], "step": [0], "level": "mix"}
    dump = StatsDump({**config, "tensor": {"scope": [], "list": [], "data_mode": ["all"]}}, model=module)
    with dump:
        sparse_runs.step(module, sparse_runs.batch_of(0)).backward()  # type: ignore[no-untyped-call]
    dump.step()


def end_inside_a_step(path: str, how: str) -> None:
    """Start a step and end inside it: killed in its backward pass, or by returning after its forward pass."""
    model = make_model()
    StatsDump({"dump_path": path, "level": "mix", "async_dump": how == "async"}, model=model).start()
    loss = model(batch()).square().sum() if how == "kill" else model(batch())
    if how == "kill":
        weight = model.get_parameter("1.linear.weight")
        weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
        loss.backward()


if __name__ == "__main__":
    end_inside_a_step(sys.argv[2], sys.argv[1])
