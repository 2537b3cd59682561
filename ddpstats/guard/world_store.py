"""The guard's part of the store of all ranks, over one connection."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from ddpstats._observe.groups import default_store
from ddpstats._ranks.comm import attempt_prefix, bounded_part
from ddpstats._ranks.store import BoundedStore

_connections: weakref.WeakKeyDictionary[Any, BoundedStore] = weakref.WeakKeyDictionary()


def world_store(prefix: str, limit_sec: float | None = None) -> BoundedStore:
    """Return a part of the default group's store. Local: it connects at the first request.

    All parts share one connection, so no request may wait there for another rank. One connection for all, for they are
    dear: torch 2.13 asks the name service for the name of each address, on both sides, and the thread that serves all
    ranks waits for the answer (strace: 5 s for each one that was lost, and with 64 ranks on one host the store was
    silent for 90 s).
    """
    world = dist.group.WORLD
    if world not in _connections:
        _connections[world] = bounded_part(default_store(), "world", "the default group", lambda _: "ddpstats/world")
    return _connections[world].part(attempt_prefix() + prefix, limit_sec)
