"""What runs on the ranks of these tests."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

import ddpstats
from ddpstats._base import marks
from ddpstats.guard import collective_guard


def parted(directory: str) -> str:
    """The seed's loop over keys that ranks do not have alike, after one on which they agree."""
    rank = dist.get_rank()
    with collective_guard("record", record_dir=directory):
        for stats in ({"loss": torch.ones(1)}, {"l1_loss" if rank == 0 else "snr_loss": torch.ones(1)}):
            for key in stats:
                dist.all_reduce(stats[key])
        ddpstats.reduce_stats({"loss": float(rank), **({"only": 1.0} if rank else {})}, per_rank=True, name="train")
        marks.tell("sentinel", "rank 1: a gradient is far from normal", step=3, ranks=(1,))
    assert marks.listeners == []
    (Path(directory) / f"fr_trace_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    return str(Path(__file__).name)


def messages(directory: str, how: str) -> str:
    """What rank 0 and rank 1 send each other under a guard that only records; how it went."""
    rank = dist.get_rank()
    there = 1 - rank
    try:
        with collective_guard("record", record_dir=directory):
            dist.barrier()
            _exchange(how, rank, there)
            dist.barrier()
            return "ended"
    except RuntimeError as error:
        return str(error)


def _exchange(how: str, rank: int, there: int) -> None:
    ones, room = torch.ones(3), torch.empty(3)
    if how == "other tag":
        dist.irecv(room, there, tag=2) if rank else dist.isend(ones, there, tag=1)
        raise RuntimeError("it has waited for too long")
    if how == "both receive":
        dist.irecv(room, there)
        raise RuntimeError("it has waited for too long")
    if how == "one fails" and rank == 1:
        raise RuntimeError("no data")
    if how == "one fails":
        dist.irecv(room, there)
        raise RuntimeError("interrupted")
    if how == "not received" and rank == 0:
        dist.isend(ones, there)
    if how == "batch":
        sends, receives = dist.P2POp(dist.isend, ones, there, tag=1), dist.P2POp(dist.irecv, room, there, tag=1)
        for work in dist.batch_isend_irecv([sends, receives] if rank else [receives, sends]):
            work.wait()
    if how == "tags crosswise":
        rooms = {tag: torch.empty(tag) for tag in (1, 2)}
        works = [dist.irecv(rooms[tag], there, tag=tag) for tag in (2, 1)]
        works += [dist.isend(torch.ones(tag), there, tag=tag) for tag in (1, 2)]
        for one in works:
            assert one is not None
            one.wait()
    if how == "from anybody":
        dist.recv(room) if rank else dist.send(ones, there)
    if how == "objects":
        dist.recv_object_list([None], there) if rank else dist.send_object_list([{"a": 1}], there)
