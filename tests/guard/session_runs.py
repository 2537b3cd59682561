"""Programs for the ranks of `test_sessions`: one of three does nothing that a guard sees, then all go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ddpstats._observe.groups import view_of
from ddpstats.guard import collective_guard
from ddpstats.guard.group import GuardMode
from ddpstats.guard.notes import Note


def gone_on(before: str, after: str, mode: GuardMode, directory: str) -> float:
    """Of an all_reduce by all ranks, in which each gives 1."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    records = f"{directory}/records"
    total = torch.ones(1)
    with collective_guard(mode, record_dir=records, timeout_sec=10):
        dist.destroy_process_group()
        _join(f"{directory}/first", rank, world_size)
        group = dist.new_group(list(np.arange(2)))  # of numpy's integers, which torch takes
        if before == "subgroup" and rank < 2:
            dist.all_reduce(torch.ones(1), group=group)
        elif before == "message" and rank < 2:
            dist.recv(torch.empty(1), 0) if rank else dist.send(torch.ones(1), 1)
        if after == "another life":
            dist.destroy_process_group()
            _join(f"{directory}/second", rank, world_size)
            dist.all_reduce(total)
            dist.barrier()
    if after == "another guard":
        with collective_guard(mode, record_dir=records, timeout_sec=10):
            dist.all_reduce(total)
            dist.barrier()
    return float(total)


def of_one_name(alike: bool) -> bool:
    """Whether two ranks meet in a group of one name; not ``alike``: it has other members on rank 1."""
    with collective_guard("strict", timeout_sec=10) as guard:
        dist.barrier()
        session = guard._watching.session
        assert session is not None
        ranks = (0, 1) if alike or dist.get_rank() == 0 else (1, 0)
        exchange = session.add(replace(view_of(dist.group.WORLD), name="pair", ranks=ranks)).exchange
        assert exchange is not None
        exchange.post(1, Note(7))
        dist.barrier()
        return exchange.look(1) is not None


def _join(file: str, rank: int, world_size: int) -> None:
    """Returns when all have joined: gloo fails a rank that still connects to one that leaves already."""
    dist.init_process_group("gloo", init_method=Path(file).as_uri(), rank=rank, world_size=world_size)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined by {rank}", "")
    store.wait([f"joined by {other}" for other in range(world_size)])
