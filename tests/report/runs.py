"""Functions that run on the ranks of these tests."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

import ddpstats
from ddpstats._base import marks
from ddpstats.guard import collective_guard


def parted(directory: str) -> str:
    """Reduce a key that all ranks have, and then one that differs between them."""
    rank = dist.get_rank()
    with collective_guard("record", record_dir=directory):
        for stats in ({"loss": torch.ones(1)}, {"l1_loss" if rank == 0 else "snr_loss": torch.ones(1)}):
            for key in stats:
                with ddpstats.label(key):
                    dist.all_reduce(stats[key])
        ddpstats.reduce_stats({"loss": float(rank), **({"only": 1.0} if rank else {})}, per_rank=True, name="train")
        marks.publish("sentinel", "rank 1: a gradient is far from normal", step=3, ranks=(1,))
    assert marks.listeners == []
    (Path(directory) / f"fr_trace_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    return str(Path(__file__).name)


def messages(directory: str, how: str) -> str:
    """Exchange messages under a guard that only records, and return how it ended."""
    rank = dist.get_rank()
    peer = 1 - rank
    try:
        with collective_guard("record", record_dir=directory):
            dist.barrier()
            _exchange(how, rank, peer)
            dist.barrier()
            return "ended"
    except RuntimeError as error:
        return str(error)


def _exchange(how: str, rank: int, peer: int) -> None:
    ones, room = torch.ones(3), torch.empty(3)
    if how == "other tag":
        dist.irecv(room, peer, tag=2) if rank else dist.isend(ones, peer, tag=1)
        raise RuntimeError("it has waited for too long")
    if how == "both receive":
        dist.irecv(room, peer)
        raise RuntimeError("it has waited for too long")
    if how == "one fails" and rank == 1:
        raise RuntimeError("no data")
    if how == "one fails":
        dist.irecv(room, peer)
        raise RuntimeError("interrupted")
    if how == "not received" and rank == 0:
        dist.isend(ones, peer)
    if how == "batch":
        sends, receives = dist.P2POp(dist.isend, ones, peer, tag=1), dist.P2POp(dist.irecv, room, peer, tag=1)
        for work in dist.batch_isend_irecv([sends, receives] if rank else [receives, sends]):
            work.wait()
    if how == "tags crosswise":
        rooms = {tag: torch.empty(tag) for tag in (1, 2)}
        works = [dist.irecv(rooms[tag], peer, tag=tag) for tag in (2, 1)]
        works += [dist.isend(torch.ones(tag), peer, tag=tag) for tag in (1, 2)]
        for pending in works:
            assert pending is not None
            pending.wait()
    if how == "from anybody":
        dist.recv(room) if rank else dist.send(ones, peer)
    if how == "objects":
        dist.recv_object_list([None], peer) if rank else dist.send_object_list([{"a": 1}], peer)
