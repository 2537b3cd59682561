"""`die` ends the process, and `count_collectives` counts each call and leaves torch as it was."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats.testing.faults import count_collectives, die
from ddpstats.testing.outcomes import RankDied
from ddpstats.testing.ranks import run_ranks


def methods() -> dict[str, Any]:
    return dict(vars(dist.ProcessGroup))


def count_several() -> tuple[dict[str, int], dict[str, int], int, bool, bool]:
    before = methods()
    world = dist.group.WORLD
    assert world is not None
    with count_collectives() as seen:
        patched = methods() != before
        dist.all_reduce(torch.ones(4))
        world.allreduce([torch.ones(2, dtype=torch.float64)]).wait()
        dist.broadcast(torch.ones(3), 0)
        dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5))
        dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(torch.ones(6), 1)
        else:
            dist.recv(torch.ones(6), 0)
    dist.all_reduce(torch.ones(1))
    same = all(methods()[name] is method for name, method in before.items())
    return dict(seen.by_op), dict(seen.bytes_by_op), seen.total, patched, same


def count_nested_and_raise() -> tuple[int, int, bool]:
    before = methods()
    with count_collectives() as outer:
        dist.all_reduce(torch.ones(1))
        with count_collectives() as inner:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    with pytest.raises(KeyError), count_collectives():
        raise KeyError
    return outer.total, inner.total, methods() == before


def test_collectives_are_counted_and_the_methods_put_back() -> None:
    for rank, (by_op, bytes_by_op, total, patched, same) in enumerate(run_ranks(count_several, 2).values()):
        point = "send" if rank == 0 else "recv"
        gather = (by_op.keys() & {"_allgather_base", "all_gather_single"}).pop()  # the name changed in torch 2.13
        assert by_op == {"allreduce": 2, "broadcast": 1, "allgather": 1, gather: 1, "barrier": 1, point: 1}
        assert bytes_by_op == {"allreduce": 32, "broadcast": 12, "allgather": 20, gather: 8, "barrier": 0, point: 24}
        assert total == 7
        assert patched
        assert same


def test_counts_nest_and_survive_an_exception() -> None:
    assert run_ranks(count_nested_and_raise, 1).values() == [(3, 1, True)]


def test_die_ends_the_process() -> None:
    error = run_ranks(die, 1, signal.SIGTERM).errors()[0]
    assert isinstance(error, RankDied)
    assert error.exit_code == -signal.SIGTERM


def test_die_says_so_when_it_fails() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with pytest.raises(RuntimeError, match="this process survived signal"):
            die(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
