"""One life of the default process group, as the guard sees it (`Session`), and the state of a guard (`GuardState`).

A program may destroy its process group and make a new one under the same names, with another store. Whatever ranks
exchanged belongs to one of these lives: a guard that outlives the first begins a new session with the second.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from ddpstats._base.text import ranks_text
from ddpstats._observe.groups import GroupView, longest_timeout_sec
from ddpstats._ranks.comm import attempt_prefix, bounded_part, refuse_fake
from ddpstats._ranks.failure import Membership
from ddpstats._ranks.gloo import store_of
from ddpstats._ranks.store import GLANCE_SEC, LIMIT_SEC, STORE_ERRORS, BoundedStore
from ddpstats.errors import ConfigError, DdpstatsError, RankMissing
from ddpstats.guard.event import Event, MessageNumbers, NumberedEvent, decode
from ddpstats.guard.failure_agreement import FailureAgreement, OwnRank
from ddpstats.guard.notes_shm import Exchange
from ddpstats.guard.printing import GIVEN_UP, MESSAGES_SEEN, RECORDED, UNSETTLED, WITHOUT_OTHERS, Tally
from ddpstats.guard.recording import Identity, Recording

GuardMode = Literal["strict", "step", "record", "off"]
MODES: tuple[GuardMode, ...] = get_args(GuardMode)

_KEPT_DESTROYED = 64
_turn = 0  # how often guards of this process have begun, and process groups ended under one
_newest = 0  # the number of the last session


def next_turn() -> None:
    """Count that a guard begins, or the default group ends: on all ranks, also on one that issues nothing."""
    global _turn
    _turn += 1


class Settings(NamedTuple):
    """The settings of a guard, as `collective_guard` explains them. ``warn``: where a mismatch is not raised."""

    mode: GuardMode
    warn: bool
    infer_labels: bool
    check_every: int
    timeout_sec: float
    has_timeout: bool  # the user has named that; otherwise the group's own timeout holds
    record_dir: str | Path | None

    @property
    def compares(self) -> bool:
        return self.mode in ("strict", "step")


@dataclass
class GuardState:
    """The state of a guard, over all its sessions."""

    verdict: DdpstatsError | None = None
    is_raised: bool = False  # the verdict was, in a thread of the program
    ends_process: bool = False  # where the program never comes back to raise it
    silent: bool = False  # a mismatch was warned of: nothing is compared any more
    waits: dict[int, tuple[str, int, str]] = field(default_factory=dict)  # by thread, see `RankStatus.waits_in`
    collectives: int = 0
    warnings: int = 0  # that ranks combine values under different names
    steps: int = 0
    past: Tally = field(default_factory=Tally)  # of sessions that are over
    recording: Recording = field(default_factory=lambda: Recording(None))

    def raise_verdict(self) -> None:
        """Raise the verdict, where some thread of this process has come to one."""
        if self.verdict is not None:
            self.is_raised = True
            raise self.verdict.with_traceback(None)

    def waits_in(self, name: str) -> tuple[str, int, str] | None:
        """Return where some thread of this rank waits: in the group of that name, if one does there."""
        waits = list(self.waits.values())
        return next((wait for wait in waits if wait[0] == name), waits[0] if waits else None)

    @contextmanager
    def note_wait(self, group: Group, seq: int, kind: str = "") -> Iterator[None]:
        """Note that this thread waits. ``kind``: `MESSAGES` where ``seq`` is the number of a message."""
        thread = threading.get_ident()
        self.waits[thread] = group.name + kind, seq, group.words
        try:
            yield
        finally:
            self.waits.pop(thread, None)
            self.recording.wait(None)


_connections: weakref.WeakKeyDictionary[Any, BoundedStore] = weakref.WeakKeyDictionary()


def world_store(prefix: str, limit_sec: float | None = None) -> BoundedStore:
    """Return a part of the default group's store. Local: it connects at the first request.

    All parts share one connection, so no request may wait there for another rank. One connection for all, for they are
    dear: torch 2.13 asks the name service for the name of each address, on both sides, and the thread that serves all
    ranks waits for the answer (strace: 5 s for each one that was lost, and with 64 ranks on one host the store was
    silent for 90 s).
    """
    world: Any = dist.group.WORLD
    if world not in _connections:
        _connections[world] = bounded_part(store_of(world), "world", "the default group", lambda _: "ddpstats/world")
    return _connections[world].part(attempt_prefix() + prefix, limit_sec)


def run_name(limit_sec: float) -> str:
    """Return the name of this run, the same on all its ranks. One question to the store; raises what that raises."""
    return world_store("ddpstats/run", limit_sec).post("token", secrets.token_hex(8)).decode(errors="replace")


class Limit(NamedTuple):
    """The longest that a wait may last. ``is_own``: by the program's own timeout, so that torch raises the error."""

    seconds: float
    is_own: bool


@dataclass(slots=True, eq=False)
class IssuedCall:
    """A collective or a message that this rank has issued, when by the monotonic clock.

    ``timeout_ms``: the call's own timeout, as `Collective.limit` has it.
    """

    group: Group
    entry: NumberedEvent
    is_on_host: bool
    timeout_ms: int | None
    issued: float

    def limit(self) -> Limit:
        """Return how long the program's wait for it may last from now on."""
        return self.group.limit(self.timeout_ms, self.issued)


def identity() -> Identity | None:
    """Return whose record this process writes; None while there is no process group. Raises what the store raises."""
    return Identity(run_name(GLANCE_SEC), dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


class Group:
    """One process group, and how far its collectives are compared."""

    def __init__(self, name: str, view: GroupView, exchange: Exchange | None, settings: Settings) -> None:
        self.name, self.view, self.exchange, self._settings = name, view, exchange, settings
        known_as = view.name[:24] if view.desc in ("", "undefined") else view.desc  # the program's own words for it
        default = f"the default group of {len(view.ranks)} ranks"
        self.words = default if view.desc == "default_pg" else f"group {known_as!r} of {ranks_text(view.ranks)}"
        self.lock = threading.RLock()  # one thread at a time compares
        self.seq = 0  # of the last collective begun
        self.newest: IssuedCall | None = None  # that one
        self.posted = 0  # the last note: of a collective in mode "strict", otherwise of all that was done so far
        self.settled = 0  # the last note that was compared
        self.rolling = 0  # digest of all that this rank did
        self.labels = 0  # digest of all its labels
        self.balance = 0
        self.agreed = 0  # the last number up to which all ranks are known to have done the same
        self.proved = 0  # the same, by a question to all ranks: so they all have the same number here
        self.noted = 0  # step: the number up to which the last note goes
        self.has_ended = False  # strict: its end was posted, as if it were a collective
        self.is_given_up = False  # torch's own timeout has ended a collective of some rank: no more is compared
        self.messages = MessageNumbers()

    def limit(self, call_ms: int | None = None, issued: float | None = None) -> Limit:
        """Return the shortest timeout of the guard, the group and the call.

        ``call_ms``: the call's own; negative or None where its group's holds. ``issued``: when it was issued, if that
        is not now; torch's own timeout counts from then.
        """
        own_sec = None if call_ms is None or call_ms < 0 else call_ms / 1000
        if own_sec is None:
            own_sec = longest_timeout_sec(self.view.group()) or None  # the program may have changed it
        named_sec = self._settings.timeout_sec
        if own_sec is None or (self._settings.has_timeout and named_sec < own_sec):
            return Limit(named_sec, False)
        passed_sec = 0.0 if issued is None else time.monotonic() - issued
        return Limit(own_sec - passed_sec, True)


class Session:
    """Made at the first collective of a life.

    ``agreement`` is None where nothing is compared, or there is no other rank. ``run`` is a name of this program that
    all its ranks share. Making one waits for no rank: they may come to it at different times.
    """

    def __init__(self, settings: Settings, own: OwnRank) -> None:
        global _turn, _newest
        if settings.compares:
            refuse_fake(dist.group.WORLD)
        self._number = _turn = _newest = max(_turn, _newest + 1)
        self._settings = settings
        self._world = weakref.ref(dist.group.WORLD)
        self.rank = dist.get_rank()
        limit_sec, self._timeout_sec = min(LIMIT_SEC, settings.timeout_sec), settings.timeout_sec
        self._store = world_store(f"ddpstats/guard/{self._number}", limit_sec)
        self._members = Membership(self._store, self.rank, range(dist.get_world_size()))
        with self._reach_store():
            self.run = run_name(limit_sec)
        self._groups: dict[GroupView, Group] = {}
        self.find = self._groups.get
        self._lives: Counter[str] = Counter()  # a group may be destroyed, and another made under its name
        self._forgotten = Tally()
        self.is_concluded = False
        self.unfinished = ""  # why the last comparison did not go to its end
        self.named: dict[str, Group] = {}
        self.agreement: FailureAgreement | None = None
        if settings.compares and dist.get_world_size() > 1:
            with self._reach_store():
                self.agreement = FailureAgreement(self._members, own, self._read_announced, self.is_reachable)

    def is_over(self) -> bool:
        """Return whether the program has destroyed the process group since."""
        return dist.group.WORLD is None or self._world() is not dist.group.WORLD

    def is_reachable(self) -> bool:
        """Return whether the store is likely to answer: torchrun's outlives a process group, another goes with it."""
        return not self.is_over() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @contextmanager
    def _reach_store(self) -> Iterator[None]:
        """Around what a group or a session needs of the store before anything can be compared."""
        try:
            with self._store.within(self._timeout_sec):
                yield
        except ConfigError:
            raise
        except STORE_ERRORS as error:
            loss = self._members.diagnose_without_store(error)
            head = "the collective_guard cannot compare the collectives of this group:"
            raise RankMissing(loss.message([head]), missing_ranks=loss.missing) from error

    def add(self, view: GroupView) -> Group:
        """Return the group, seen for the first time. Waits for no rank: they may see groups in different order."""
        self._forget_destroyed()
        self._lives[view.name] += 1
        session, life = self._number, self._lives[view.name]
        exchange = None
        if self._settings.compares and len(view.ranks) > 1:
            # Ranks that make groups in different order have different groups of one name, which must not be compared.
            ranks_digest = zlib.crc32(repr(view.ranks).encode())
            part = self._store.part(f"group/{view.name}/{ranks_digest:08x}/{life}", self._timeout_sec)
            with self._reach_store():
                exchange = Exchange(part, view.ranks.index(view.rank), len(view.ranks))
        # Numbers begin again with each of these: nothing of one is ever compared, or shown, as if it were the other's.
        name = view.name + f" of session {session}" * (session > 1) + f" of life {life}" * (life > 1)
        group = self._groups[view] = self.named[name] = Group(name, view, exchange, self._settings)
        return group

    def groups(self) -> list[Group]:
        """Return the groups whose collectives are compared, in an order that all ranks share.

        A group in which this rank has only sent and received is not among them: its other ranks may never come to it.
        """
        used = [group for group in list(self.named.values()) if group.exchange and group.seq and not group.is_given_up]
        return sorted(used, key=lambda group: group.name)

    def _forget_destroyed(self) -> None:
        """Close what belongs to groups that are destroyed, once these are many: programs may make thousands."""
        destroyed = [name for name, group in self.named.items() if not group.view.is_alive()]
        for name in destroyed[:-_KEPT_DESTROYED]:
            group = self.named.pop(name)
            self._groups.pop(group.view, None)
            self._forgotten += self._tally_of(group)
            if group.exchange is not None:
                group.exchange.close()

    def _read_announced(self, name: str, rank: int) -> list[Event]:
        """Return what a rank of this host announced of its last collectives in a group before it issued them."""
        group = self.named.get(name)
        if group is None or group.exchange is None or rank not in group.view.ranks:
            return []
        return list(decode(group.exchange.read_announced(group.view.ranks.index(rank))))

    # -- counting -----------------------------------------------------------------------------------------------------

    def tally(self) -> Tally:
        """Return what was compared so far, and what was not."""
        return sum((self._tally_of(group) for group in list(self.named.values())), self._forgotten)

    def note(self, name: str, seq: int, differed: bool) -> None:
        """Note a verdict: before a difference all was the same on all ranks, and after it nothing is compared."""
        group = self.named.get(name)
        if group is not None and differed:
            group.agreed = max(group.agreed, min(seq - 1, group.seq))
        self.unfinished = "the first that differs, or after it" if differed else "not known to be equal by then"

    def _tally_of(self, group: Group) -> Tally:
        if group.exchange is None:
            why = WITHOUT_OTHERS if self._settings.compares else RECORDED
            return Tally(0, Counter({why: group.seq + group.messages.seen}))
        agreed = min(group.agreed, group.seq)
        agreeing = group.view.ranks if agreed else ()
        why = GIVEN_UP if group.is_given_up else self.unfinished or UNSETTLED
        left = Counter({why: group.seq - agreed, MESSAGES_SEEN: group.messages.seen})
        return Tally(agreed, left, frozenset(agreeing))

    def leave(self, how: str) -> None:
        """Report that this rank leaves; never waits."""
        if self.agreement is not None and self.is_reachable():
            self.agreement.leave(how, {name: group.seq + group.has_ended for name, group in self.named.items()})

    def close(self) -> None:
        """Close what this process holds. Local and idempotent."""
        if self.agreement is not None:
            self.agreement.close()  # first: its watchdog looks into what the exchanges hold
        for group in self.named.values():
            if group.exchange is not None:
                group.exchange.close()


# -- the end of the default process group -----------------------------------------------------------------------------

_at_destroy: Callable[[Any], None] | None = None
_original_shutdown: Any = vars(dist.ProcessGroup).get("shutdown")  # torch 2.6 has none, and no guard
_was_destroyed = False


def call_before_destroy(ask: Callable[[Any], None] | None) -> None:
    """Call ``ask`` with each process group that is about to be shut down; None restores everything.

    ``destroy_process_group`` asks each group to shut down, however the program imported that function.
    """
    global _at_destroy
    _at_destroy = ask
    dist.ProcessGroup.shutdown = _original_shutdown if ask is None else _shutdown  # type: ignore[method-assign]


def _shutdown(self: Any) -> None:
    global _was_destroyed
    _was_destroyed = True
    if _at_destroy is not None:
        _at_destroy(self)
    _original_shutdown.__get__(self)()


def had_ranks() -> bool:
    """Return whether this process has, or had, a process group, or was started to be one of several ranks."""
    if dist.is_initialized() or _was_destroyed:
        return True
    size = os.environ.get("WORLD_SIZE", "")
    is_worker = multiprocessing.parent_process() is not None  # of a DataLoader, say
    return "RANK" in os.environ and size.isdecimal() and int(size) > 1 and not is_worker
