"""Collectives of torch that the table does not know yet, and waits: what `test_operators` runs on the ranks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddpstats import collective_guard
from ddpstats._observe.groups import HOST, backend_of, unbox_group, unbox_work
from ddpstats._observe.operators import OPERATORS, Operator
from ddpstats._ranks.gloo import done_within
from ddpstats.dump import StatsDump
from ddpstats.errors import CollectiveMismatch, ConfigError

_NEW = (
    "relay_(Tensor[] output_tensors, Tensor[] input_tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
    "int root_rank, bool async_op=True, int timeout=-1) -> __torch__.torch.classes.c10d.Work"
)
ROW = Operator(
    "relay_",
    "relay",
    "out:output in:input dst group",
    "out:output_tensors in:input_tensors process_group root_rank async_op timeout",
    to_root=True,
)


def _relay(
    outputs: list[Any], inputs: list[Any], group: Any, root: int, async_op: bool = True, timeout: int = -1
) -> Any:
    """The sum, by the backend itself, so that no known operator is involved."""
    outputs[0].copy_(inputs[0])
    return backend_of(unbox_group(group), HOST).allreduce(outputs).boxed()


@contextlib.contextmanager
def _new_operator() -> Iterator[Callable[[int, int], None]]:
    """Yield what calls the collective ``c10d::relay_`` with so many elements, to a root; torch has it meanwhile."""
    library: Any = torch.library.Library("c10d", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(_NEW)
    library.impl("relay_", _relay, "CPU")
    world: Any = dist.group.WORLD

    def call(size: int, root: int) -> None:
        issued = torch.ops.c10d.relay_([torch.zeros(size)], [torch.ones(size)], world.boxed(), root, False)
        unbox_work(issued).wait()

    try:
        yield call
    finally:
        library._destroy()


def collective_that_is_new(path: str) -> tuple[str, str, list[dict[str, Any]], list[tuple[str, Any, Any]]]:
    """Return the refusal without a row; with it, the mismatch of roots, the record and the entries of a dump."""
    rank, directory = dist.get_rank(), Path(path)
    with _new_operator() as relay:
        with pytest.raises(ConfigError) as refusal, collective_guard("strict"):
            pass
        OPERATORS["relay_"] = ROW
        try:
            with collective_guard("strict", record_dir=directory / "record", timeout_sec=20):
                relay(3, 1)
            with pytest.raises(CollectiveMismatch) as mismatch, collective_guard("strict", timeout_sec=20):
                relay(3, rank)
            with StatsDump({"dump_path": str(directory / "dump")}) as dump:
                relay(3, 1)
            dump.step()
        finally:
            del OPERATORS["relay_"]
    recorded = [line for line in _recorded(directory / "record") if line.get("op") == "relay"]
    entries = json.loads((directory / f"dump/step0/rank{rank}/dump.json").read_text())["data"]
    ours = {name: entry for name, entry in entries.items() if name.startswith("Distributed.")}
    named = [(name, entry["input_args"][0]["Max"], entry["output"][0]["Max"]) for name, entry in ours.items()]
    return str(refusal.value), str(mismatch.value), recorded, named


def labels_of_torchs_own(path: str) -> set[tuple[str, str | None]]:
    """Return (op, label) of each collective that torch issues by itself: in DDP, in ZeRO and in FSDP."""
    from torch.distributed.fsdp import fully_shard  # takes long to import
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    sharded = nn.Linear(2, 2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with collective_guard("record", record_dir=path):
        for _ in range(2):  # DDP sends its buffers before the second
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            sharded(torch.ones(4, 2)).sum().backward()
    return {(line["op"], line.get("label")) for line in _recorded(Path(path)) if "op" in line}


def _recorded(directory: Path) -> list[dict[str, Any]]:
    """Return what this rank has written into its record."""
    files = directory.glob(f"*{dist.get_rank()}*")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def waits_in_slices(count: int) -> int:
    """Return how many collectives that end about when a slice does were waited for once more."""
    later, limit = 0, timedelta(milliseconds=1)
    for _ in range(count):
        if dist.get_rank() == 1:
            time.sleep(0.0009)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if not done_within(work, limit):
            later += 1
            while not done_within(work, limit):
                pass
    return later
