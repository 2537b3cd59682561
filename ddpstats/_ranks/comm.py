"""The collectives that this library issues, and the process groups over which it does.

Every method of a `Comm` is a collective: all ranks of the group must call the same methods in the same order. Every
method has a timeout and raises `CommFailed` where it could not be completed; `failure` decides what that means.

How gloo waits (torch 2.13, measured): the timeout of an operation starts again at every step of its ring, so a rank may
wait several times as long; a rank that gave up is not noticed by the others; ``abort()`` wakes no rank; and destroying
a group joins its operations, so it blocks as long as they do. So `wait_in_slices` cuts the wait into slices, between
which the rank looks for failures of others; and a group whose operation never ended is kept instead of destroyed.

Checked on torch 2.13 (gloo), tried on 2.9 and 2.6. A group's store and ``Work.wait(timeout)`` are needed; where the
first cannot be had, the first use of a group is a `ConfigError`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ddpstats._base.text import Rank, first_line
from ddpstats._ranks.failure import CLOSED
from ddpstats._ranks.gloo import (
    OWN_GROUP,
    done_within,
    gloo_backend,
    group_around,
    init_method,
    own_connection,
    part_of,
    store_of,
)
from ddpstats._ranks.store import STORE_ERRORS, BoundedStore
from ddpstats.errors import ConfigError

# Called between two slices of a wait; returns why it is pointless to wait on, or None.
Watch = Callable[[], str | None]

ReduceOp = Literal["sum", "max"]

_LONGEST_SLICE_SEC = 1.0


class CommFailed(Exception):
    """Raised where a collective did not complete: a peer is gone, late, or never came. Holds the backend's own words.

    ``is_broken``: a peer closed its connection, as it does when its process ends. ``is_late``: this rank had no time
    left before its collective began, so that others may wait for it.
    """

    def __init__(self, reason: str, *, is_broken: bool = False, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_broken, self.is_late = is_broken, is_late


class Comm(Protocol):
    """The connection of one rank to the others: gloo, a grid of gloo groups, or threads. One suite tests them all.

    ``ranks`` are global ranks in the order of the group; ``rank`` is this process's own global rank. ``watch`` is
    called about once a second by a rank that waits.
    """

    ranks: tuple[int, ...]
    rank: int
    watch: Watch

    def all_reduce(self, op: ReduceOp, tensor: torch.Tensor, timeout_sec: float) -> None:
        """Sum, or take the maximum of, a float64 tensor of one size on all ranks, in place; the same bits on each."""

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        """Return every rank's payload, of one length on all ranks, in the order of ``ranks``."""

    def broadcast(self, tensor: torch.Tensor, source: int, timeout_sec: float) -> None:
        """Fill the tensor, of one size and dtype on all ranks, with that of the rank at position ``source``."""

    def close(self) -> None:
        """Leave the group; never blocks."""


def slice_sec(timeout_sec: float) -> float:
    """Return how long a rank waits before it looks for failures of others."""
    return min(_LONGEST_SLICE_SEC, timeout_sec / 10)


def last_moment(started: float, timeout_sec: float) -> float:
    """Return when the collectives of a call must end, so that their failure is reported within ``timeout_sec``.

    At least one slice from now.
    """
    step = slice_sec(timeout_sec)
    return max(started + timeout_sec - 3 * step, time.monotonic() + step)


def wait_in_slices(done_within: Callable[[float], bool], timeout_sec: float, watch: Watch) -> None:
    """Wait until ``done_within(seconds)`` is true. Raises `CommFailed` after the timeout, or as ``watch`` says."""
    deadline = time.monotonic() + timeout_sec
    step = slice_sec(timeout_sec)
    while not done_within(step):
        _check_watch(watch)
        if time.monotonic() >= deadline:
            raise CommFailed(f"no answer for {timeout_sec:.1f} s")


def _check_watch(watch: Watch) -> None:
    if (reason := watch()) is not None:
        raise CommFailed(reason)


# Operations that never ended, with the memory they may still write to and their group.
_abandoned: list[Any] = []


class GlooComm:
    """Real ranks over a CPU gloo group of their own, beside the user's group; each connects to every other one."""

    def __init__(
        self, ranks: tuple[int, ...], rank: int, store: BoundedStore, timeout_sec: float, watch: Watch = lambda: None
    ) -> None:
        """``store``: a part of the group's store that no group has used before."""
        self.ranks = ranks
        self.rank = rank
        self.watch: Watch = watch
        self._group: Any
        # Kept to be the last to go: it ends without the GIL, which its threads may be waiting for; torch 2.6's group
        # would end it with the GIL.
        self._backend: Any
        self._group, self._backend = _connect_group(store, ranks.index(rank), len(ranks), timeout_sec, watch)
        self._sum, self._max = dist.AllreduceOptions(), dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._max.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)

    def all_reduce(self, op: ReduceOp, tensor: torch.Tensor, timeout_sec: float) -> None:
        options = self._sum if op == "sum" else self._max
        # Not longer than we wait: gloo then closes the connections, and a rank that comes too late does not find what
        # this one has sent.
        options.timeout = timedelta(seconds=timeout_sec)
        # The group's own method: `dist.all_reduce` adds its logging and checks to every call.
        self._finish(self._group.allreduce, ([tensor], options), timeout_sec)

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        gathered = [bytearray(len(payload)) for _ in self.ranks]
        outputs = list(map(as_byte_tensor, gathered))
        own = as_byte_tensor(payload if isinstance(payload, bytearray) else bytearray(payload))
        options = _options("AllgatherOptions", timeout_sec)
        self._finish(self._group.allgather, ([outputs], [own], options), timeout_sec)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int, timeout_sec: float) -> None:
        options = _options("BroadcastOptions", timeout_sec)
        options.rootRank, options.rootTensor = source, 0
        self._finish(self._group.broadcast, ([tensor], options), timeout_sec)

    def _finish(self, start: Callable[..., Any], arguments: tuple[Any, ...], timeout_sec: float) -> None:
        """Start an operation and wait for its end."""
        work: Any = None
        try:
            work = start(*arguments)
            wait_in_slices(lambda sec: done_within(work, timedelta(seconds=sec)), timeout_sec, self.watch)
        except RuntimeError as error:
            raise CommFailed(first_line(error), is_broken=CLOSED.search(str(error)) is not None) from None
        except BaseException:  # `watch` or an interrupt ended the wait, while the operation goes on
            _abandoned.append((arguments, work, self._group, self._backend))  # the memory it may still write to
            raise

    def close(self) -> None:
        self._group = None  # ends with its last user, and that may be an operation that never ended
        self._backend = None


def _connect_group(store: BoundedStore, rank: int, size: int, timeout_sec: float, watch: Watch) -> tuple[Any, Any]:
    """Return the group and its backend, connected. Raises `CommFailed`."""

    def connect(raw: Any, prefix: str) -> tuple[Any, Any]:
        meeting_store = part_of(raw, prefix + "gloo")
        return meeting_store, gloo_backend(meeting_store, rank, size, timeout_sec)

    try:
        meeting_store, backend = store.use(connect, timeout_sec, lambda: _check_watch(watch))
    except BaseException as error:  # an interrupt too, of which the others are to know
        store.renew()  # the connection belongs to the request that was given up
        if isinstance(error, ConfigError):  # this store cannot do what is needed
            raise
        if isinstance(error, STORE_ERRORS):
            raise CommFailed(first_line(error)) from None
        raise
    return group_around(backend, meeting_store, rank, size, OWN_GROUP), backend


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

    def all_reduce(self, op: ReduceOp, tensor: torch.Tensor, timeout_sec: float) -> None:
        """Do nothing: one rank's sum, or maximum, is its own value."""

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        return [payload]

    def broadcast(self, tensor: torch.Tensor, source: int, timeout_sec: float) -> None:
        """Do nothing: there is no other rank to send to."""

    def close(self) -> None:
        """Do nothing: there is no group to leave."""


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """Return the process group meant by ``group`` (None: the default one); None where this process is alone.

    Raises ``ConfigError`` for what is no group, and on a rank that is not a member.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None and group is not None:
        raise ConfigError("group= is given, but torch.distributed is not initialized on this rank")
    if group is None:
        return world
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"rank {dist.get_rank()} is not a member of the group it passed; only members may call")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group= is of type {type(group).__name__}; a torch.distributed ProcessGroup or None is needed"
        )
    return group


def describe_group(group: dist.ProcessGroup) -> str:
    """Return the group in words for messages: its description, size and backend."""
    name = "the default group" if group is dist.group.WORLD else f"group {group.group_name[:24]!r}"
    return f"{name} of {group.size()} ranks"


def refuse_fake(group: Any) -> None:
    """Raise `ConfigError` for a group whose other ranks do not exist."""
    if re.search(r"\bfake\b", str(dist.get_backend_config(group))):
        raise ConfigError(
            f"{describe_group(group)} has the backend 'fake': its other ranks do not exist, so nothing can be "
            "reduced or compared over it. Use a real backend, or leave ddpstats out of this run."
        )


def attempt_prefix() -> str:
    """Return the prefix of this attempt of a torchrun job, which earlier attempts do not use; on all ranks the same.

    Ranks of a new attempt use the store of the one before. Each of torchrun's agents counts for itself (torch 2.13:
    one whose ranks were ended because those of another host had died counts nothing), so on several hosts the numbers
    say nothing.
    """
    on_host, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"attempt{restarts}" if on_host == everywhere and restarts != "0" else ""


def group_store(group: dist.ProcessGroup) -> BoundedStore:
    """Return a part of the group's store that no group has used before. Local: it connects at the first request.

    A group that is made again under an old name finds the keys of its predecessor in the store. Each rank therefore
    counts how often it came here; ranks that go through the same groups count the same. In another attempt of
    torchrun's they begin again: ranks that died had not come through the same groups.
    """
    refuse_fake(group)
    prefix, rank = f"ddpstats{attempt_prefix()}", dist.get_rank()

    def own_part(connected: Any) -> str:
        return f"{prefix}/{connected.add(f'{prefix}/generation/{rank}', 1)}"

    return bounded_part(store_of(group), group.group_name, describe_group(group), own_part)


def bounded_part(store: Any, name: str, group_words: str, prefix_of: Callable[[Any], str]) -> BoundedStore:
    """Return the keys of ``store`` below a prefix, over a separate connection.

    A wait in a TCPStore keeps all users of that object waiting: two groups could wait for each other.
    """
    rank = dist.get_rank()

    def connect() -> Any:
        connected = own_connection(store, name)
        with _as_config_error(group_words):
            part = part_of(connected, prefix_of(connected))
            _try_out(part, rank)
        return part

    return BoundedStore(connect, host_rank=_host_rank())


def _try_out(store: Any, rank: int) -> None:
    """Use each method that is needed later, once."""
    key = f"try/{rank}"
    store.set(key, "1")
    if not store.check([key]) or bytes(store.get(key)) != b"1":
        raise NotImplementedError("a key that was set does not exist")
    if bytes(store.compare_set(key, "1", "2")) != b"2":
        raise NotImplementedError("compare_set does not set")


_MISSING = re.compile(r"pure virtual|internal assert", re.IGNORECASE)
_UNABLE = re.compile(_MISSING.pattern + r"|not (yet )?(implemented|supported)|unsupported", re.IGNORECASE)


@contextmanager
def _as_config_error(group_words: str) -> Iterator[None]:
    """Raise `ConfigError` for a store that cannot do what is needed, as opposed to one that does not answer."""
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and not _UNABLE.search(str(error))):
            raise
        why = "a method is missing" if _MISSING.search(str(error)) else first_line(error)
        raise ConfigError(
            f"the store of {group_words} cannot do what ddpstats needs (set, get, check, add, compare_set): "
            f"{why}. Ranks need a store of theirs, such as the TCPStore that init_process_group makes."
        ) from None


def _host_rank() -> int | None:
    """Return the rank that serves the store: 0 where torch made the store itself, and torchrun's agent does not."""
    method = init_method()
    if method is None or not method.startswith(("env://", "tcp://")):
        return None
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of the group's members in the group's order, each with its group rank."""
    return tuple(Rank(rank, group_rank) for group_rank, rank in enumerate(dist.get_process_group_ranks(group)))


def as_byte_tensor(buffer: bytearray) -> torch.Tensor:
    """Return a view of ``buffer``: the bytearray holds what a collective writes into it."""
    if not buffer:  # `frombuffer` refuses it; a collective over nothing still is one
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8)
