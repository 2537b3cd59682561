"""Collectives that ranks run while a watch records them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats.dump import StatsDump
from ddpstats.dump.collect._collectives import CollectiveWatch

Seen = dict[str, Any]


class Recorder:
    """Remembers what a step's recorder is told."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._counts: Counter[object] = Counter()

    def number(self, what: object) -> int:
        self._counts[what] += 1
        return self._counts[what] - 1

    def collective_begins(self, api: str, tensors: Sequence[Tensor], kwargs: Mapping[str, object]) -> object:
        if api == "all_gather":  # the one that nobody asked for
            return None
        found: Seen = {"api": api, "inputs": [tensor.tolist() for tensor in tensors]}
        for key, leaf in kwargs.items():
            assert isinstance(leaf, dict)
            found[key] = leaf.get("value", leaf)
        self.seen.append(found)
        return found

    def collective_ends(self, token: object, outputs: Sequence[Tensor], *, is_incomplete: bool = False) -> None:
        assert isinstance(token, dict)
        assert "outputs" not in token
        if is_incomplete:
            token["incomplete"] = True
        token["outputs"] = [tensor.tolist() for tensor in outputs]

    def note_error(self, where: str, error: BaseException) -> None:
        raise AssertionError(where) from error


class Failing(Recorder):
    """Fails at everything."""

    def collective_begins(self, api: str, tensors: Sequence[Tensor], kwargs: Mapping[str, object]) -> object:
        if api == "broadcast":
            raise ValueError("begins")
        return api

    def collective_ends(self, token: object, outputs: Sequence[Tensor], *, is_incomplete: bool = False) -> None:
        raise ValueError("ends")

    def note_error(self, where: str, error: BaseException) -> None:
        self.seen.append({"where": where, "error": str(error)})


def watch_for(recorder: Recorder) -> CollectiveWatch:
    return CollectiveWatch(cast(Any, recorder))


def failing() -> tuple[list[Seen], list[float]]:
    """What a recorder that fails is told, and what the program gets meanwhile."""
    recorder = Failing()
    watch = watch_for(recorder)
    watch.start()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.ones(1, 1)).sum().backward()
    watch.stop()
    return recorder.seen, [tensor.item(), *(p.grad.item() for p in model.parameters() if p.grad is not None)]


def watched(rank: int, run: Callable[[int], None]) -> list[Seen]:
    recorder = Recorder()
    watch = watch_for(recorder)
    watch.start()
    try:
        run(rank)
    finally:
        watch.stop()
        watch.stop()
    dist.all_reduce(torch.ones(1))  # not seen any more
    return recorder.seen


def everything(rank: int) -> dict[str, list[Seen]]:
    runs = {
        "in place": _in_place,
        "asynchronous": _asynchronous,
        "rooted": _rooted,
        "pieces": _pieces,
        "messages": _messages,
        "reducer": _reducer,
        "subgroup": _subgroup,
        "never waited for": _never_waited_for,
    }
    return {name: watched(rank, run) for name, run in runs.items()}


def _in_place(rank: int) -> None:
    dist.all_reduce(torch.tensor([1.0 + rank]))
    dist.all_reduce(torch.tensor([1.0 + rank, 5.0]), op=dist.ReduceOp.MAX)
    dist.barrier()


def _asynchronous(rank: int) -> None:
    tensor = torch.tensor([1.0 + rank])
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    tensor.zero_()  # what came out has been taken


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
        assert work is not None
        work.wait()
    else:
        dist.recv(torch.zeros(1), src=0, tag=3)
        work = dist.isend(torch.tensor([8.0]), dst=0)
        assert work is not None
        work.wait()


def _reducer(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), gradient_as_bucket_view=True)
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    model(torch.tensor([[1.0 + rank]])).sum().backward()
    model.zero_grad(set_to_none=False)  # what the reducer gave has been taken


def _subgroup(rank: int) -> None:
    groups = [dist.new_group([one]) for one in range(2)]
    dist.all_reduce(torch.tensor([1.0 + rank]), group=groups[rank])
    swapped = dist.new_group([0, 1])
    dist.broadcast(torch.tensor([1.0 + rank]), src=1, group=swapped)


_later: list[Any] = []


def _never_waited_for(rank: int) -> None:
    """Rank 1 sends when the watch of rank 0 has stopped: the receive is not done, and must not be waited for."""
    if rank == 0:
        _later.append(dist.irecv(torch.zeros(1), src=1))


class Dividing(nn.Module):
    """Rank 1 takes the logarithm of a negative number in its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).abs() + 1.0
        out: Tensor = self.second(torch.log(-hidden if dist.get_rank() == 1 else hidden))
        return out


def dumped(path: str) -> None:
    """A step of DDP, dumped with all that comes after the backward pass."""
    model = DistributedDataParallel(Dividing())
    optimizer = torch.optim.SGD(model.parameters())
    dump = StatsDump({"dump_path": path, "step": [0], "level": "mix"}, model=model)
    dump.start()
    shared = torch.ones(2)
    dist.all_reduce(shared)
    model(shared[None]).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dump.stop()


Both = tuple[dict[str, list[Seen]], dict[str, list[Seen]], tuple[list[Seen], list[float]], list[Seen]]


def both(path: str) -> Both:
    rank = dist.get_rank()
    first = everything(rank)
    if rank == 1:
        dist.send(torch.tensor([1.0]), dst=0)
    for work in _later:
        work.wait()
    dumped(path)
    return first, under_guard(rank), failing(), watched(rank, _raising)


def _raising(rank: int) -> None:
    with contextlib.suppress(ValueError, RuntimeError):
        dist.all_gather_into_tensor(torch.ones(5), torch.ones(3))
    dist.all_reduce(torch.ones(1))


def under_guard(rank: int) -> dict[str, list[Seen]]:
    """A guard waits for messages in the program's place, whichever of the two came first."""
    from ddpstats import collective_guard

    def messages_and_more(rank: int) -> None:
        _messages(rank)
        _asynchronous(rank)

    def guarded(rank: int) -> None:
        with collective_guard(mode="strict"):
            messages_and_more(rank)

    inside = watched(rank, guarded)
    with collective_guard(mode="strict"):
        outside = watched(rank, messages_and_more)
    return {"inside": inside, "outside": outside}
