"""The only file that issues collectives of ours.

Every method of a `Comm` is a collective: all ranks of the group must call the same methods in the same order. Every
method has a timeout and raises `CommFailed` where it could not be completed; what that means is decided by `mailbox`.

How gloo waits (torch 2.13, measured): the timeout of an operation counts anew for every step of its ring, so a rank may
wait several times as long; a rank that gave up is not noticed by the others; ``abort()`` wakes nobody; and destroying a
group joins its operations, so it blocks as long as they do. So `wait_in_slices` cuts the wait into slices, and between
two of them the rank looks at the mailbox; a group whose operation never ended is kept instead of destroyed.

Checked on torch 2.13 (gloo), tried on 2.9 and 2.6. A group's store and ``Work.wait(timeout)`` are needed; where the
first cannot be had the first use of a group says so (`ConfigError`).
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpstats._base.text import first_line, members
from ddpstats._ranks.gloo import (
    OWN_GROUP,
    default_store,
    done_within,
    gloo_backend,
    group_around,
    init_method,
    own_connection,
    part_of,
    store_of,
)
from ddpstats._ranks.launcher import attempt
from ddpstats._ranks.store import STORE_ERRORS, BoundedStore
from ddpstats.errors import ConfigError

Watch = Callable[[], None]
"""Called between two slices of a wait; raises `CommFailed` where waiting on has become pointless."""


class CommFailed(Exception):
    """A collective did not complete: a peer is gone, late, or was never there. Holds the backend's own words."""


class Comm(Protocol):
    """How this rank reaches the others; `_ranks.threads` has one for threads, and one suite tests both.

    ``ranks`` are global ranks in the order of the group; ``rank`` is this process's own global rank. ``watch`` is
    called about once a second by a rank that waits.
    """

    ranks: tuple[int, ...]
    rank: int
    watch: Watch

    def all_reduce_sum(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        """Sum a float64 tensor of the same size on all ranks, in place, with the same bits on every rank."""

    def all_reduce_max(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        """Element-wise maximum, in place."""

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        """Every rank's payload, of one length on all ranks, in the order of ``ranks``."""

    def broadcast(self, payload: bytes | None, size: int, source: int, timeout_sec: float) -> bytes:
        """The ``size`` bytes of the rank at position ``source``; the others pass None."""

    def close(self) -> None:
        """Leave the group; never blocks."""


def slice_sec(timeout_sec: float) -> float:
    """How long a rank waits before it looks at the mailbox."""
    return min(1.0, timeout_sec / 10)


def patience_sec(timeout_sec: float) -> float:
    """How long one collective may take, so that what is to be said about its failure is said within ``timeout_sec``."""
    return timeout_sec - 3 * slice_sec(timeout_sec)


def wait_in_slices(done_within: Callable[[float], bool], timeout_sec: float, watch: Watch) -> None:
    """Wait until ``done_within(seconds)`` is true, looking up between slices. Raises `CommFailed` after the timeout."""
    deadline = time.monotonic() + timeout_sec
    step = slice_sec(timeout_sec)
    while not done_within(step):
        watch()
        if time.monotonic() >= deadline:
            raise CommFailed(f"no answer for {timeout_sec:.1f} s")


# Operations that never ended, with the memory they may still write to and their group.
_abandoned: list[Any] = []


class GlooComm:
    """Real ranks over a CPU gloo group of our own, beside the user's group. Every rank connects to every other one."""

    def __init__(
        self, ranks: tuple[int, ...], rank: int, store: BoundedStore, timeout_sec: float, watch: Watch = lambda: None
    ) -> None:
        """``store``: a part of the group's store where nobody met before."""
        self.ranks = ranks
        self.rank = rank
        self.watch: Watch = watch
        self._group: Any
        # Kept to be the last to go: it ends without the GIL, which its threads may be waiting for; torch 2.6's group
        # would end it with the GIL.
        self._backend: Any
        self._group, self._backend = _connected_group(store, ranks.index(rank), len(ranks), timeout_sec, watch)
        self._sum, self._max = dist.AllreduceOptions(), dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._max.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._timeout_sec = 0.0
        self._slice = 0.0, timedelta(0)

    def all_reduce_sum(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._all_reduce(tensor, self._sum, timeout_sec)

    def all_reduce_max(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        self._all_reduce(tensor, self._max, timeout_sec)

    def _all_reduce(self, tensor: torch.Tensor, options: Any, timeout_sec: float) -> None:
        if timeout_sec != self._timeout_sec:
            self._timeout_sec = timeout_sec
            self._sum.timeout = self._max.timeout = timedelta(seconds=timeout_sec)
        # The group's own method: `dist.all_reduce` adds its logging and checks to every call.
        self._finish(self._group.allreduce, ([tensor], options), timeout_sec)

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        everyone = [bytearray(len(payload)) for _ in self.ranks]
        outputs = list(map(as_tensor, everyone))
        mine = as_tensor(payload if isinstance(payload, bytearray) else bytearray(payload))
        options = _options("AllgatherOptions", timeout_sec)
        self._finish(self._group.allgather, ([outputs], [mine], options), timeout_sec)
        return everyone

    def broadcast(self, payload: bytes | None, size: int, source: int, timeout_sec: float) -> bytes:
        buffer = bytearray(size if payload is None else payload)
        self.broadcast_tensor(as_tensor(buffer), source, timeout_sec)
        return bytes(buffer)

    def broadcast_tensor(self, tensor: torch.Tensor, source: int, timeout_sec: float) -> None:
        """The same, of a tensor of the same size and dtype on all ranks, in place."""
        options = _options("BroadcastOptions", timeout_sec)
        options.rootRank, options.rootTensor = source, 0
        self._finish(self._group.broadcast, ([tensor], options), timeout_sec)

    def _finish(self, start: Callable[..., Any], arguments: tuple[Any, ...], timeout_sec: float) -> None:
        """Start an operation and wait for its end."""
        if timeout_sec != self._slice[0]:
            self._slice = timeout_sec, timedelta(seconds=slice_sec(timeout_sec))
        work: Any = None
        try:
            work = start(*arguments)
            if not done_within(work, self._slice[1]):
                self.watch()
                wait_in_slices(lambda sec: done_within(work, timedelta(seconds=sec)), timeout_sec, self.watch)
        except RuntimeError as error:
            raise CommFailed(first_line(error)) from None
        except BaseException:  # nobody waits any more, by `watch` or by an interrupt, while the operation goes on
            _abandoned.append((arguments, work, self._group, self._backend))  # the memory it may still write to
            raise

    def close(self) -> None:
        self._group = None  # ends with its last user, and that may be an operation that never ended
        self._backend = None


def _connected_group(store: BoundedStore, rank: int, size: int, timeout_sec: float, watch: Watch) -> tuple[Any, Any]:
    """The group, and its backend."""

    def connect(raw: Any, prefix: str) -> tuple[Any, Any]:
        met = part_of(raw, prefix + "gloo")
        return met, gloo_backend(met, rank, size, timeout_sec)

    try:
        met, backend = store.use(connect, timeout_sec, watch)
    except BaseException as error:  # an interrupt too: the others are to hear of it
        store.renew()  # the connection belongs to what was given up, and there is something to be told
        if isinstance(error, STORE_ERRORS):
            raise CommFailed(first_line(error)) from None
        raise
    return group_around(backend, met, rank, size, OWN_GROUP), backend


def _options(name: str, timeout_sec: float) -> Any:
    # These two are not re-exported by torch.distributed; looked up late, for builds of torch without distributed.
    options = getattr(dist.distributed_c10d, name)()
    options.timeout = timedelta(seconds=timeout_sec)
    return options


class SoloComm:
    """One rank alone: no process group, or one of size 1. Nothing is sent."""

    def __init__(self, rank: int = 0) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.rank = rank
        self.watch: Watch = lambda: None

    def all_reduce_sum(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        """One rank's sum is its own value."""

    def all_reduce_max(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        """One rank's maximum is its own value."""

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        return [payload]

    def broadcast(self, payload: bytes | None, size: int, source: int, timeout_sec: float) -> bytes:
        return payload or b""

    def close(self) -> None:
        """Nothing to leave."""


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """The process group meant by ``group`` (None: the default one); None where this process is alone.

    Raises ``ConfigError`` for what is no group, and on a rank that is not a member.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ConfigError("group= is given, but torch.distributed is not initialized on this rank")
        return None
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"rank {dist.get_rank()} is not a member of the group it passed; only members may call")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group= is of type {type(group).__name__}; a torch.distributed ProcessGroup or None is needed"
        )
    return group


def describe_group(group: dist.ProcessGroup) -> str:
    """The group in words for messages: its description, size and backend."""
    name = "the default group" if group is dist.group.WORLD else f"group {group.group_name[:24]!r}"
    return f"{name} of {group.size()} ranks"


def refuse_fake(group: Any) -> None:
    """Raises `ConfigError` for a group whose other ranks do not exist."""
    if re.search(r"\bfake\b", str(dist.get_backend_config(group))):
        raise ConfigError(
            f"{describe_group(group)} has the backend 'fake': its other ranks do not exist, so nothing can be "
            "reduced or compared over it. Use a real backend, or leave ddpstats out of this run."
        )


def group_store(group: dist.ProcessGroup) -> BoundedStore:
    """The store that the group met on, for what a collective cannot tell; a part of it that nobody used before.

    Local: connects in the background. A group that is made again under an old name finds the keys of its predecessor in
    the store. Each rank therefore counts how often it came here; ranks that go through the same groups count alike. In
    another attempt of torchrun's they begin anew: who died had not come through the same groups.
    """
    refuse_fake(group)
    store = store_of(group)
    rank, name, group_words = dist.get_rank(), group.group_name, describe_group(group)

    def connect() -> Any:
        connected = own_connection(store, name)
        with _as_config_error(group_words):
            ours = f"ddpstats{attempt()}"
            generation = connected.add(f"{ours}/generation/{rank}", 1)
            part = part_of(connected, f"{ours}/{generation}")
            _try_out(part, rank)
        return part

    return BoundedStore(connect, address=_address(store), host_rank=_host_rank())


_connections: weakref.WeakKeyDictionary[Any, BoundedStore] = weakref.WeakKeyDictionary()


def world_store(prefix: str, limit_sec: float | None = None) -> BoundedStore:
    """A part of the default group's store. All parts share one connection, so nothing may be asked that waits there.

    Local: connects in the background. One connection for all, for they are dear: torch 2.13 asks the name service for
    the name of each address, on both sides, and the thread that serves all ranks waits for the answer (strace: 5 s for
    each one that was lost, and with 64 ranks on one host the store was silent for 90 s).
    """
    world = dist.group.WORLD
    if world not in _connections:
        store, rank = default_store(), dist.get_rank()

        def connect() -> Any:
            # Who waits in a TCPStore keeps all users of that object waiting: two groups could wait for each other.
            connected = own_connection(store, "world")
            with _as_config_error("the default group"):
                _try_out(dist.distributed_c10d.PrefixStore("ddpstats/world", connected), rank)
            return connected

        _connections[world] = BoundedStore(connect, address=_address(store), host_rank=_host_rank())
    return _connections[world].part(attempt() + prefix, limit_sec)


def _try_out(store: Any, rank: int) -> None:
    """Use what is needed later, once."""
    key = f"try/{rank}"
    store.set(key, "1")
    if not store.check([key]) or bytes(store.get(key)) != b"1":
        raise NotImplementedError("what was set is not there")
    if bytes(store.compare_set(key, "1", "2")) != b"2":
        raise NotImplementedError("compare_set does not set")


_MISSING = re.compile(r"pure virtual|internal assert", re.IGNORECASE)
_UNABLE = re.compile(_MISSING.pattern + r"|not (yet )?(implemented|supported)|unsupported", re.IGNORECASE)


@contextmanager
def _as_config_error(group_words: str) -> Iterator[None]:
    """A store that cannot do what is needed, as opposed to one that does not answer."""
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and not _UNABLE.search(str(error))):
            raise
        said = "a method is missing" if _MISSING.search(str(error)) else first_line(error)
        raise ConfigError(
            f"the store of {group_words} cannot do what ddpstats needs (set, get, check, add, compare_set): "
            f"{said}. Ranks need a store of theirs, such as the TCPStore that init_process_group makes."
        ) from None


def _address(store: Any) -> tuple[str, int] | None:
    """Where a store is served; None for one that has no address."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    try:
        return str(store.host), int(store.port)
    except (AttributeError, RuntimeError):
        return None


def have_all_started() -> bool:
    """Whether every rank of the default group is known to have been there: gloo lets none go on without the others."""
    return "gloo" in str(dist.get_backend_config())


def _host_rank() -> int | None:
    """The rank that serves the store: rank 0, where torch made the store itself and torchrun's agent does not serve."""
    method = init_method()
    if method is None or not method.startswith(("env://", "tcp://")):
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return 0


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of the group's members, ascending."""
    return members(dist.get_process_group_ranks(group))


def as_tensor(buffer: bytearray) -> torch.Tensor:
    """A view of ``buffer``: what a collective writes into it is in the bytearray."""
    if not buffer:  # `frombuffer` refuses it; a collective of nothing still is one
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8)
