"""Two ranks of NCCL that share one card, in which the tests' programs run as on gloo.

NCCL refuses two ranks on one card of one host. It goes by the name that NCCL_HOSTID gives to the host.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpstats._observe.groups import default_store
from tests.guard import scenarios


def name_hosts(rank: int) -> None:
    """Let NCCL take each rank for one of a host of its own; before the process group is made."""
    os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def use_nccl() -> None:
    """Make the default process group of this rank one of NCCL, and new tensors live on the card. Once a process."""
    if dist.get_backend() == "nccl":
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    name_hosts(rank)
    store = PrefixStore("nccl", default_store())
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.set_default_device("cuda")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == size


def probe(name: str, mode: str, bad: bool) -> scenarios.Ending:
    use_nccl()
    return scenarios.probe(name, mode, bad)
