"""The undocumented functions of torch that `_ranks` needs; `_observe.torch_compat` has those of the rooms above it.

- ``ProcessGroup._set_default_backend``, ``_register_backend``, ``_set_group_name``, ``_set_group_desc``: a group that
  torch's registry knows nothing of. Tried when a group is made; without the first two there is no reduction (the first
  use of a group raises ``AttributeError``), without the last two the group has no name.
- ``ProcessGroup.get_group_store`` (newer than torch 2.6), or ``distributed_c10d._world``: the store of a group's
  rendezvous. Without either the first use of a group raises `ConfigError`.
- ``Store.clone`` (newer than torch 2.6): another connection to the same store. Without it one is made to a `TCPStore`'s
  host and port, and any other store is shared with the program.
- ``distributed_c10d._default_pg_init_method``: whether torch made that store. Without it no rank is known to serve it,
  and the death of rank 0 is called a store that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpstats.errors import ConfigError

OWN_GROUP = "ddpstats"  # the name and the description of groups that carry our own collectives


def gloo_backend(store: Any, rank: int, size: int, timeout_sec: float) -> Any:
    """Connect a gloo backend to the other ranks through ``store``. Raises what the store and gloo raise."""
    kind: Any = dist.distributed_c10d.ProcessGroupGloo
    return kind(store, rank, size, timedelta(seconds=timeout_sec))


def group_around(backend: Any, store: Any, rank: int, size: int, name: str) -> Any:
    """Return a process group of that backend alone, for tensors in host memory. Local.

    Not `dist.new_group`: only the members of a subgroup may be asked to call it, and with
    ``use_local_synchronization=True`` it makes up the name of the rendezvous from the *number* of groups that this
    process has (torch 2.13, ``_hash_ranks_to_str``). Ranks 0 and 1 of the groups [0, 1] and [1, 2] would wait for each
    other under two names.
    """
    made: Any = dist.ProcessGroup(store, rank, size)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    for set_it in ("_set_group_name", "_set_group_desc"):
        if hasattr(made, set_it):
            getattr(made, set_it)(name)
    return made


def done_within(work: Any, limit: timedelta, wait: Callable[..., Any] | None = None) -> bool:
    """Wait for a collective; False if it goes on. Raises RuntimeError, as the backend does, if it failed.

    ``wait``: in place of ``work.wait``. Not for a message: one that was waited for in vain is never complete again.
    """
    wait = wait or dist.Work.wait
    try:
        wait(work, limit)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    wait(work, limit)  # raises why it failed; where it did not, it ended between that wait and this look
    return True


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of the rendezvous of ``group``. Raises `ConfigError` where torch does not say."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    try:
        return dist.distributed_c10d._world.pg_map[group][1]
    except (AttributeError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"torch {torch.__version__} does not give the store of a process group, and without it nothing can be "
            "reduced. Install a torch that ddpstats was run with: docs/compatibility.md"
        ) from None


def own_connection(store: Any, name: str) -> Any:
    """Return another connection to the store of the group of that name, or the store itself where torch has none.

    Raises what connecting raises.
    """
    try:
        return store.clone()
    except dist.DistError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError):  # an older torch, or a store written in Python
        innermost = store
        while hasattr(innermost, "underlying_store"):
            innermost = innermost.underlying_store
        if not hasattr(innermost, "libuvBackend"):
            return store
        return part_of(_client_of(innermost), name)  # torch does not give the prefixes above


def part_of(store: Any, prefix: str) -> Any:
    """Return the keys of ``store`` that begin with ``prefix``; its ``clone()`` has them over another connection."""
    kind: Any = dist.distributed_c10d.PrefixStore
    if hasattr(kind, "clone"):
        return kind(prefix, store)

    class ClonablePrefixStore(kind):  # type: ignore[misc]
        def clone(self) -> Any:
            return part_of(store.clone() if hasattr(store, "clone") else _client_of(store), prefix)

    return ClonablePrefixStore(prefix, store)


def _client_of(server: Any) -> Any:
    """Return another connection to a `TCPStore`, and any other store itself."""
    if not hasattr(server, "libuvBackend"):
        return server
    return type(server)(
        server.host, server.port, None, False, server.timeout, wait_for_workers=False, use_libuv=server.libuvBackend
    )


def init_method() -> str | None:
    """Return the URL at which ``init_process_group`` made the store; None where it got one, or torch does not say."""
    url = getattr(dist.distributed_c10d, "_default_pg_init_method", None)
    return url if isinstance(url, str) else None
