"""The process group of one process: every collective that torch knows, as if all ranks did what this one does."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ddpstats.capture._echo_group import echoing
from ddpstats.errors import ConfigError

X = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("op", "factor"),
    [(dist.ReduceOp.SUM, 4), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 1)],
    ids=["sum", "avg", "min", "max"],
)
def test_reductions(op: dist.ReduceOp.RedOpType, factor: int) -> None:
    with echoing(2, 4) as calls:
        tensor = X.clone()
        work = dist.all_reduce(tensor, op=op, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(tensor, X * factor)
        reduced = X.clone()
        dist.reduce(reduced, 0, op=op)
        assert torch.equal(reduced, X * factor)
        part = torch.zeros(1)
        dist.reduce_scatter(part, list(X.chunk(4)), op=op)
        assert part.item() == 3 * factor
        assert dict(calls) == {"all_reduce": 1, "reduce": 1, "reduce_scatter": 1}


def test_the_others() -> None:
    with echoing(2, 4) as calls:
        assert (dist.get_rank(), dist.get_world_size(), os.environ["RANK"]) == (2, 4, "2")
        places = [torch.zeros(4) for _ in range(4)]
        dist.all_gather(places, X)
        assert all(torch.equal(place, X) for place in places)
        objects: list[object] = [None] * 4
        dist.all_gather_object(objects, {"a": 1})
        assert objects == [{"a": 1}] * 4
        tensor = X.clone()
        dist.broadcast(tensor, 0)
        assert torch.equal(tensor, X)
        dist.scatter(tensor, None, 0)
        dist.gather(X, None, 0)
        given = list(X.chunk(4))
        taken = [torch.zeros(1) for _ in range(4)]
        dist.all_to_all(taken, given)
        assert [one.item() for one in taken] == [3, 3, 3, 3]
        single = torch.zeros(4)
        dist.all_to_all_single(single, X)
        assert single.tolist() == [3, 3, 3, 3]
        dist.barrier()
        assert calls["barrier"] == 1


def test_functional_collectives() -> None:
    with echoing(1, 2):
        world = dist.group.WORLD
        assert world is not None
        assert torch.equal(functional.all_reduce(X, "sum", world) + 0, 2 * X)
        assert torch.equal(functional.broadcast(X, 0, world) + 0, X)
        assert torch.equal(functional.all_gather_single(X, 0, world) + 0, torch.cat([X, X]))


def test_smaller_groups() -> None:
    with echoing(1, 4):
        mine = dist.new_group([0, 1])
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mine)
        assert (tensor.item(), dist.get_rank(mine), dist.get_world_size(mine)) == (2, 1, 2)
        assert dist.new_group([2, 3]) == dist.GroupMember.NON_GROUP_MEMBER


def test_distributed_data_parallel() -> None:
    with echoing(0, 2):
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        module(X).sum().backward()
        weight = module.module.weight
        assert weight.grad is not None
        assert torch.equal(weight.grad[0], X)


def test_what_one_rank_cannot_answer() -> None:
    with echoing(0, 2):
        with pytest.raises(ConfigError, match="the step calls send"):
            dist.send(X, 1)
        with pytest.raises(ConfigError, match="the step calls recv"):
            dist.recv(X, 1)
        with pytest.raises(ConfigError, match="a process group already"), echoing(0, 2):
            pass


def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    hook = sys.excepthook
    for world_size in (1, 2, 3):
        with echoing(0, world_size) as calls:
            dist.all_reduce(X.clone())
            assert calls["all_reduce"] == 1
        assert not dist.is_initialized()
    assert os.environ["RANK"] == "7"
    assert "WORLD_SIZE" not in os.environ
    assert sys.excepthook is hook
    with echoing(0, 2):
        dist.destroy_process_group()
