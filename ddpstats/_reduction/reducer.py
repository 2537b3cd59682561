"""Reduce nested statistics over ranks: aligned by key, each with its own weight, in one collective.

>>> import ddpstats
>>> reduced = ddpstats.reduce_stats({"loss": 0.5, "tokens": ddpstats.Sum(128)}, weight=8.0)
>>> reduced.values
{'loss': 0.5, 'tokens': 128.0}
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import torch.distributed as dist

from ddpstats._base import config
from ddpstats._base.caches import EmptiedCache
from ddpstats._base.lazy import breaks_graph
from ddpstats._ranks.calls import Channel, channel_of
from ddpstats._ranks.exchange import Call
from ddpstats._ranks.store import rest
from ddpstats._reduction.read import prepare
from ddpstats._reduction.reduce import Reduction
from ddpstats._reduction.result import Entry, RankValues, Reduced
from ddpstats.errors import ConfigError, DdpstatsError

__all__ = [
    "Entry",
    "NonFinitePolicy",
    "PendingReduction",
    "RankValues",
    "Reduced",
    "ReductionCounters",
    "StatsReducer",
    "reduce_stats",
]

NonFinitePolicy = Literal["propagate", "skip", "raise"]


@dataclass(frozen=True)
class ReductionCounters:
    """Counts of what a reducer has done so far.

    Attributes:
        calls: reductions asked for.
        collectives: collectives issued for them: one per call in steady state; one more where some rank holds Min or
            Max; at most three more where some rank has a new path.
        renegotiations: how often the ranks exchanged what they hold: once per new path, not per call.
        payload_bytes: bytes of the buffers that this rank passed to those collectives.
    """

    calls: int = 0
    collectives: int = 0
    renegotiations: int = 0
    payload_bytes: int = 0


class PendingReduction:
    """A reduction on its way. Neither method issues a collective, so ranks may call them at different times."""

    def __init__(self, future: Future[Reduced], channel: Channel) -> None:
        self._future, self._channel = future, channel

    @breaks_graph
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._future.done()

    @breaks_graph
    def result(self) -> Reduced:
        """Wait for the reduction; raises what it raised, on every rank the same. Bounded by the reducer's timeout."""
        if not self._future.done():
            self._channel.refuse_inside()
        if not self._channel.wait(self._future):
            raise DdpstatsError("the reduction was given up: its worker thread has ended")
        return self._future.result()


class StatsReducer:
    """Reduces nested stats over the ranks of a group; remembers their layout, so that one collective a call is enough.

    Args:
        group: a process group, or None for the default one. Without torch.distributed, or alone: local arithmetic.
        name: names the call site ("train", "valid"). Each name has its own layout, and two ranks that pair different
            names get `ProtocolMismatch`. Calls without a name cannot be distinguished: a rank with one call more
            than the others is then noticed only when it waits alone.
        nonfinite: ``"propagate"``: a NaN stays a NaN in its path. ``"skip"``: that rank's entry counts as absent for
            that path. ``"raise"``: `NonFiniteStat` on every rank. Must be the same on every rank.
        timeout_sec: limit of one call in seconds, the rendezvous of all ranks included; default
            DDPSTATS_TIMEOUT_SEC, or 300.
        per_rank: also `Reduced.by_rank`: which rank held what. One collective more, in which each rank gets 9 bytes of
            every rank for each path of the layout, at most 256 MB in all. Must be the same on every rank.

    Raises:
        ConfigError: an argument that cannot work; on this rank, before anything is sent.

    Making one is local. A context manager, whose `close` waits for what `start` began. A copy reduces over its group;
    another process can have one that was made without ``group=``.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        name: str | None = None,
        nonfinite: NonFinitePolicy = "propagate",
        timeout_sec: float | None = None,
        per_rank: bool = False,
    ) -> None:
        config.check_choice("nonfinite", nonfinite, get_args(NonFinitePolicy))
        config.check_flag("per_rank", per_rank)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"name={name!r} must be a str or None")
        self._find_group = None if group is None else _GroupReference(group)
        self._timeout_sec = config.timeout_sec(timeout_sec)
        self._call = Call("reduce_stats", name, nonfinite, per_rank)
        self._counters = Counter[str]()
        self._closed = False
        self._started: tuple[weakref.ref[Future[Reduced]], weakref.ref[Channel]] | None = None  # the last by `start`

    @breaks_graph
    def __call__(self, stats: Any, weight: Any = 1.0) -> Reduced:
        """Reduce ``stats`` over all ranks. Collective: every rank of the group must call, in the same order of calls.

        Args:
            stats: dicts, lists and tuples, nested as you like; mappings, namedtuples and dataclass instances are read
                as dicts; keys are str or int.
                Leaves: Python and numpy scalars, tensors of one element (any real dtype, any device), None, the markers
                `Mean`, `Sum`, `Min`, `Max`, `Any`, `All`; with a 1-d weight also 1-d tensors of its length. Ranks may
                hold different keys, orders and list lengths.
                A finite value is at most 1e200 in size.
            weight: this rank's weight of the bare leaves, usually its batch size: a number, or a 1-d tensor; each 0 or
                between 1e-100 and 1e100.

        Returns:
            `Reduced`: the union of the paths that some rank held in this call, the same on every rank. Each mean is
            divided by the weight of the ranks that hold its path. Accumulated in float64.

        Raises:
            InvalidStats: some rank holds a leaf, key, weight or structure that cannot be reduced, or ``per_rank`` is
                more than its limit; on every rank.
            SchemaConflict: ranks hold a leaf and a container, or two reduce ops, under one path; on every rank.
            ProtocolMismatch: ranks made different calls (names, policies, versions); on every rank.
            NonFiniteStat: under ``nonfinite="raise"``; on every rank.
            RankMissing: a rank did not take part within the timeout; on every living rank. The reducer is then closed.

        Example::

            rank 0: reduce({"l1_loss": 0.057}, weight=8)   rank 1: reduce({"snr_loss": -2.0}, weight=8)
            both:   .values == {"l1_loss": 0.057, "snr_loss": -2.0}
        """
        return self._reduce(stats, weight)

    @breaks_graph
    def start(self, stats: Any, weight: Any = 1.0) -> PendingReduction:
        """Like calling, without waiting: the reduction runs on a thread while, say, backward does.

        Collective in the same sense: every rank must start the same reductions in the same order. Values are taken
        now (tensors on an accelerator: by a copy in stream order), so they may change afterwards. Errors come from
        `result`.
        """
        channel = self._usable_channel()
        prepared = prepare(stats, weight, per_rank=self._call.per_rank)
        future = channel.submit(Reduction(self._call, prepared, self._counters).perform, self._timeout_sec)
        self._started = weakref.ref(future), weakref.ref(channel)
        return PendingReduction(future, channel)

    def _reduce(self, stats: Any, weight: Any, *, keep_dtypes: bool = False, divide: bool = True) -> Reduced:
        """Do what `__call__` does, with the dtypes of the leaves, or sums in place of means, for `recursive_op`."""
        channel = self._usable_channel()
        prepared = prepare(stats, weight, keep_dtypes, self._call.per_rank)
        return channel.run(Reduction(self._call, prepared, self._counters, divide).perform, self._timeout_sec)

    @property
    def counters(self) -> ReductionCounters:
        """The counts of this reducer so far; a frozen copy."""
        return ReductionCounters(**self._counters)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which counts its own calls, and waits for what it started itself."""
        return {**vars(self), "_counters": self._counters.copy(), "_started": None}

    def close(self) -> None:
        """End this reducer, once what it started has ended; it leaves no thread of Python's.

        Local; idempotent. What gloo needs for the group, threads in C++ and a port that listens, stays until
        ``destroy_process_group``.
        """
        self._closed = True
        if self._started is not None:
            future, channel = self._started[0](), self._started[1]()
            if future is not None and channel is not None:
                channel.wait(future)
        rest()

    def __enter__(self) -> StatsReducer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _usable_channel(self) -> Channel:
        if self._closed:
            raise ConfigError("this StatsReducer is closed")
        # Looked up every time: groups may be destroyed and made again, and nothing here may keep one alive.
        return channel_of(None if self._find_group is None else self._find_group())


class _GroupReference:
    """``group`` when called. A process group belongs to torch and the caller, not to us."""

    def __init__(self, group: Any) -> None:
        self.find: Callable[[], Any] = weakref.ref(group) if isinstance(group, dist.ProcessGroup) else lambda: group

    def __call__(self) -> Any:
        group = self.find()
        if group is None:
            raise ConfigError("the process group of this reducer was destroyed")
        return group

    def __deepcopy__(self, memo: object) -> _GroupReference:
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a process group cannot go to another process; make what has group= on each rank, there")


_reducers: EmptiedCache[tuple[int, str, str | None, str, bool], StatsReducer] = EmptiedCache(max_entries=256)
_reducers_lock = threading.Lock()


@breaks_graph
def reduce_stats(
    stats: Any,
    weight: Any = 1.0,
    *,
    group: Any = None,
    name: str | None = None,
    nonfinite: NonFinitePolicy = "propagate",
    per_rank: bool = False,
) -> Reduced:
    """Reduce nested stats over ranks, in one line. Collective: every rank of ``group`` must call.

    Keeps one `StatsReducer` per group and name; arguments, result, errors and an example are described there.
    """
    return kept_reducer(group, name, nonfinite, per_rank=per_rank)(stats, weight)


def kept_reducer(
    group: Any, name: str | None, nonfinite: NonFinitePolicy, kind: str = "reduce_stats", *, per_rank: bool = False
) -> StatsReducer:
    """Return the reducer that `reduce_stats` keeps for these arguments. Local.

    Ranks that pair reductions of different ``kind``, the name of the public function, get `ProtocolMismatch`.
    """
    key = (id(group), kind, name, nonfinite, per_rank)
    try:
        kept = _reducers.get(key)
    except TypeError:  # what cannot be a key is no legal argument either
        return StatsReducer(group=group, name=name, nonfinite=nonfinite, per_rank=per_rank)
    # A group that is gone may have had the same id.
    if kept is not None and (kept._find_group is None or kept._find_group.find() is group):
        return kept
    made = StatsReducer(group=group, name=name, nonfinite=nonfinite, per_rank=per_rank)
    made._call = made._call._replace(kind=kind)
    with _reducers_lock:
        return _reducers.keep(key, made)
