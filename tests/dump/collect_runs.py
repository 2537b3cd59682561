"""What processes do in tests of the collector."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpstats.dump import StatsDump
from tests.capture import sparse_runs
from tests.dump.collecting import batch, hooks_of, make_model


def train(dump_path: str | None, level: str = "mix", is_async: bool = False) -> dict[str, Any]:
    """Two steps under DDP, of each rank's own data."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dump = None
    if dump_path is not None:
        config = {"dump_path": dump_path, "level": level, "async_dump": is_async, "step": [1]}
        dump = StatsDump(config, model=model)
    torch.manual_seed(rank)
    for number in range(3):
        if dump is not None:
            dump.start()
        model(batch(10 * rank + number)).square().sum().backward()
        if dump is not None:
            dump.stop()
        optimizer.step()
        optimizer.zero_grad()
        if dump is not None:
            dump.step()
    parameters: list[Tensor] = [parameter.detach() for parameter in model.parameters()]
    return {
        "parameters": [one.tolist() for one in parameters],
        "hooks": hooks_of(model),
        "next": torch.rand(2).tolist(),
    }


def train_all(path: str) -> dict[str, dict[str, Any]]:
    """All kinds in one set of ranks."""
    found = {"plain": train(None)}
    for level in ("L0", "L1", "mix"):
        for is_async in (False, True):
            name = f"{level} {is_async}"
            found[name] = train(str(Path(path) / name), level, is_async)
    return found


def train_sharded(path: str) -> list[float]:
    """FSDP2: two backward passes in one step; this rank's part of a gradient after each."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    dump = StatsDump({"dump_path": path, "level": "L0"}, model=model)
    dump.start()
    norms = []
    for number in range(2):
        model(batch(number)).square().sum().backward()
        gradient: Any = model.get_parameter("3.weight").grad
        norms.append(gradient.to_local().norm().item())
    dump.stop()
    return norms


def killed_inside_a_step(path: str) -> None:
    model = make_model()
    dump = StatsDump({"dump_path": path, "level": "mix"}, model=model)
    dump.start()
    loss = model(batch()).square().sum()
    model.get_parameter("1.linear.weight").register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
    loss.backward()


def ends_inside_a_step(path: str, is_async: bool) -> None:
    model = make_model()
    dump = StatsDump({"dump_path": path, "level": "mix", "async_dump": is_async}, model=model)
    dump.start()
    model(batch())


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        killed_inside_a_step(sys.argv[2])
    else:
        ends_inside_a_step(sys.argv[2], sys.argv[1] == "async")


def sparse_gradients(dump_path: str) -> None:
    """A step of DDP whose embedding has sparse gradients, with its tensors saved."""
    module = sparse_runs.made("ddp")
    config = {"task": "tensor", "dump_path": dump_path, "rank": [], "step": [0], "level": "mix"}
    dump = StatsDump({**config, "tensor": {"scope": [], "list": [], "data_mode": ["all"]}}, model=module)
    dump.start()
    sparse_runs.step(module, sparse_runs.batch_of(0)).backward()  # type: ignore[no-untyped-call]
    dump.stop()
    dump.step()
