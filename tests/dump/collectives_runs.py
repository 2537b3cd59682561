"""Collectives that two ranks run while a dump records them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import collective_guard
from ddpstats._observe.groups import operators_name_reduce_op
from ddpstats.dump import StatsDump

MANY = 300


def dump_all(path: str) -> None:
    """Dump each of the programs below into a directory of its name, and a step of DDP into ``training``."""
    rank = dist.get_rank()
    for name, program in PROGRAMS.items():
        _dump(Path(path) / name, program, rank)
    if operators_name_reduce_op:
        _dump(Path(path) / "around a guard", _under_guard, rank)
        with collective_guard(mode="strict"):
            _dump(Path(path) / "inside a guard", _messages, rank)
    outputs = {"list": ["Distributed"], "data_mode": ["output"]}
    with StatsDump({"dump_path": f"{path}/outputs", "statistics": outputs}) as dump:
        _in_place(rank)
    dump.step()
    _dump_unfinished(Path(path) / "unfinished", rank)
    _dump_training(Path(path) / "training")


def _dump(path: Path, program: Callable[[int], None], rank: int) -> None:
    dump = StatsDump({"dump_path": str(path), "statistics": {"list": ["Distributed"]}})
    with dump:
        program(rank)
    dist.all_reduce(torch.ones(1))  # comes too late to be recorded
    dump.step()


def _in_place(rank: int) -> None:
    dist.all_reduce(torch.tensor([1.0 + rank]))
    dist.all_reduce(torch.tensor([1.0 + rank, 5.0]), op=dist.ReduceOp.MAX)
    dist.barrier()


def _asynchronous(rank: int) -> None:
    tensor = torch.tensor([1.0 + rank])
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    tensor.zero_()  # after the output was measured


def _future(rank: int) -> None:
    tensor = torch.tensor([1.0 + rank])
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.get_future().wait()
    tensor.mul_(3.0)


def _many(rank: int) -> None:
    """Collectives of rank 0 are all pending until rank 1 makes its own, and all done when the next one begins."""
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
    works = [dist.all_reduce(torch.tensor([float(number)]), async_op=True) for number in range(MANY)]
    if rank == 0:
        dist.send(torch.ones(1), dst=1)
    for work in works:
        assert work is not None
        work.get_future().wait()
    dist.barrier()


def _any_source(rank: int) -> None:
    for number in range(3):
        if rank == 0:
            dist.send(torch.tensor([float(number)]), dst=1)
        else:
            dist.recv(torch.zeros(1), src=0 if number == 1 else None)


def _rooted(rank: int) -> None:
    dist.broadcast(torch.tensor([1.0 + rank]), src=1)
    dist.reduce(torch.tensor([1.0 + rank]), dst=1)
    pieces = [torch.tensor([3.0]), torch.tensor([4.0])]
    dist.scatter(torch.zeros(1), pieces if rank == 0 else None, src=0)


def _pieces(rank: int) -> None:
    dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.tensor([1.0 + rank]))
    dist.all_gather_into_tensor(torch.zeros(2), torch.tensor([1.0 + rank]))
    dist.reduce_scatter_tensor(torch.zeros(1), torch.tensor([1.0 + rank, 10.0]))
    dist.all_to_all_single(torch.zeros(2), torch.tensor([1.0 + rank, 10.0 + rank]))


def _messages(rank: int) -> None:
    if rank == 0:
        dist.send(torch.tensor([7.0]), dst=1, tag=3)
        work = dist.irecv(torch.zeros(1), src=1)
    else:
        dist.recv(torch.zeros(1), src=0, tag=3)
        work = dist.isend(torch.tensor([8.0]), dst=0)
    assert work is not None
    work.wait()


def _under_guard(rank: int) -> None:
    """Run under a guard, which waits for messages in the program's place."""
    with collective_guard(mode="strict"):
        _messages(rank)


def _reducer(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), gradient_as_bucket_view=True)
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    model(torch.tensor([[1.0 + rank]])).sum().backward()
    model.zero_grad(set_to_none=False)  # after the reducer's output was measured


def _subgroups(rank: int) -> None:
    groups = [dist.new_group([member]) for member in range(2)]
    dist.all_reduce(torch.tensor([1.0 + rank]), group=groups[rank])
    swapped = dist.new_group([0, 1])
    dist.broadcast(torch.tensor([1.0 + rank]), src=1, group=swapped)


def _raising(rank: int) -> None:
    with contextlib.suppress(ValueError, RuntimeError):
        dist.all_gather_into_tensor(torch.ones(5), torch.ones(3))
    dist.all_reduce(torch.ones(1))


PROGRAMS: dict[str, Callable[[int], None]] = {
    "in place": _in_place,
    "asynchronous": _asynchronous,
    "future": _future,
    "many": _many,
    "any source": _any_source,
    "rooted": _rooted,
    "pieces": _pieces,
    "messages": _messages,
    "reducer": _reducer,
    "subgroups": _subgroups,
    "raising": _raising,
}


def _dump_unfinished(path: Path, rank: int) -> None:
    """Rank 1 sends when the dump of rank 0 has stopped: the receive is not complete, and must not be waited for."""
    dump = StatsDump({"dump_path": str(path)})
    with dump:
        work = dist.irecv(torch.zeros(1), src=1) if rank == 0 else None
    if work is None:
        dist.send(torch.ones(1), dst=0)
    else:
        work.wait()
    dump.step()


class LogOfNegative(nn.Module):
    """Rank 1 takes the logarithm of a negative number between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).abs() + 1.0
        out: Tensor = self.second(torch.log(-hidden if dist.get_rank() == 1 else hidden))
        return out


def _dump_training(path: Path) -> None:
    """Dump a step of DDP, with what comes after the backward pass."""
    model = DistributedDataParallel(LogOfNegative())
    optimizer = torch.optim.SGD(model.parameters())
    dump = StatsDump({"dump_path": str(path), "level": "mix"}, model=model)
    with dump:
        shared = torch.ones(2)
        dist.all_reduce(shared)
        model(shared[None]).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dump.step()
