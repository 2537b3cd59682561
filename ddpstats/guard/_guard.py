"""The guard: watches the collectives of this process and compares them with those of the other ranks.

What happens to a collective, in the order of the code:

1. It is described: signature, label, call site, its number in its group. It goes into the ring, and into the record if
   there is one. strict and record: before it is issued; step: while it is on its way.
2. strict: its note is posted. A blocking one waits for all ranks' notes, so that nothing moves before all agree; others
   are settled when the program waits for them, or at the next blocking one of their group.
   step: its digest is rolled into the group's; the rolling digest is compared at `step()` and every N collectives.
3. `Guard.after` waits for a blocking collective, in slices, between which it looks for alarms and for ranks that left.

Whatever is found goes through `_inquiry`, and is the same error on every rank.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from ddpstats import _config, _intercept
from ddpstats._comm import part_of, world_store
from ddpstats._events import Event, RecordWriter, Ring, roll
from ddpstats._intercept import Collective, GroupView
from ddpstats.errors import CollectiveMismatch, ConfigError, DdpstatsError, RankMissing
from ddpstats.guard._describe import describe, pieces_of
from ddpstats.guard._diagnosis import LEFT, MISMATCH, Finding, Testimony
from ddpstats.guard._exchange import Exchange, Note, Overrun, agree
from ddpstats.guard._frames import calling_frame, label_of, site_of
from ddpstats.guard._inquiry import Alarm, Inquiry, main_stack
from ddpstats.guard._labels import current_label
from ddpstats.guard._p2p import Awaited, Messages, called_blocking, unmatched

MismatchPolicy = Literal["raise", "warn"]

RING_EVENTS = 10_000
GRADIENTS = "(gradients)"  # the label of what autograd calls: DDP's buckets, FSDP's shards
_TESTIFIED_EVENTS = 64  # at least, of one group
_SLICE_SEC = 0.2
_NEVER = 1 << 62
_END = Note(0x454E44, 0)  # posted in place of a collective by a rank that leaves
_BROKEN = re.compile(r"connection (closed|reset)|timed out|broken pipe", re.IGNORECASE)

log = logging.getLogger("ddpstats")


@dataclass(frozen=True)
class GuardCounters:
    """Of one guard, so far. ``compared``: collectives whose signature was compared with the other ranks'."""

    collectives: int
    compared: int
    not_compared: int
    steps: int


class _Group:
    """What the guard knows of one process group."""

    def __init__(self, view: GroupView, words: str, exchange: Exchange | None) -> None:
        self.view, self.words, self.exchange = view, words, exchange
        self.seq = 0  # of the last collective begun
        self.settled = 0  # strict: up to here all ranks agree
        self.rolling = 0
        self.balance = 0
        self.checks = 0  # step: how many comparisons were posted
        self.checks_settled = 0
        self.keys: tuple[str, ...] = ()
        self.messages: Messages | None = None


class _Work(NamedTuple):
    """Something that runs, and that the program will wait for."""

    work: Any
    group: _Group
    event: Event
    awaited: Awaited | None

    def is_done(self) -> bool:
        """A message is never taken for done: its receiver still has to compare it."""
        return self.event.group == self.group.view.name and bool(self.work.is_completed())


_guards = 0  # how many guards this process has begun with a process group: ranks that do alike count alike


class collective_guard(ContextDecorator):  # used like `torch.no_grad`
    """Compare the collectives of this process with those of the other ranks, and name the first that differs.

    A context manager, and a decorator. Every rank must enter and leave it at the same place of its program; inside,
    ranks may do what they like as long as they issue the same collectives per group, in the same order.

    Args:
        mode: "strict": compared before a blocking collective moves data, asynchronous ones when they are waited for;
            "step": compared at each `step` and every ``check_every`` collectives of a group; "record": nothing is
            compared while running, each rank writes what it does to ``record_dir``; "off": nothing is done at all.
        on_mismatch: "raise", or "warn": the error's text as a warning of the logger "ddpstats", and no more comparing.
        infer_labels: look in the calling frames for the key under which the program reached the tensor.
        check_every: collectives of one group between two comparisons; mode "step" only.
        timeout_sec: how long a collective may wait for other ranks; None: DDPSTATS_TIMEOUT_SEC, else 300 seconds.
        record_dir: write each rank's collectives there, as JSON lines for ``ddpstats report``; any mode but "off".

    Raises:
        CollectiveMismatch: on every rank, from the collective at which it was noticed, from `step` or on leaving.
        RankMissing: on every living rank: a rank died, left, or did not come within the timeout.
        ConfigError: an argument, or a torch whose collectives this version cannot observe; on this rank only.

    Limits: one guard at a time. A collective that C++ waits for (DDP, functional collectives) is settled at the next
    one of its group, at `step` or on leaving. Point-to-point is recorded, and not compared yet.

    Example::

        with ddpstats.collective_guard("strict"):
            train()      # rank 0: all_reduce(stats["snr"])   rank 1: all_reduce(stats["l1"])
        # both: CollectiveMismatch: ... rank 0: all_reduce(float32[], sum) 'snr' at train.py:12 in train ...
    """

    def __init__(
        self,
        mode: _config.GuardMode = "step",
        *,
        on_mismatch: MismatchPolicy = "raise",
        infer_labels: bool = True,
        check_every: int = 64,
        timeout_sec: float | None = None,
        record_dir: str | Path | None = None,
    ) -> None:
        _check_choice("mode", mode, get_args(_config.GuardMode))
        _check_choice("on_mismatch", on_mismatch, get_args(MismatchPolicy))
        if type(check_every) is not int or check_every < 1:
            raise ConfigError(f"check_every={check_every!r} must be a whole number of collectives, at least 1")
        if mode == "record" and record_dir is None:
            raise ConfigError("mode='record' needs record_dir=, where the records are written")
        self.mode, self._warn, self._infer = mode, on_mismatch == "warn", infer_labels
        self._check_every = check_every if mode == "step" else _NEVER
        # Twice, for a comparison is settled at the next one.
        self._testified = _TESTIFIED_EVENTS + (2 * min(check_every, RING_EVENTS) if mode == "step" else 0)
        self._timeout_sec = _config.timeout_sec(timeout_sec)
        self._record_dir = record_dir
        self._compares = mode in ("strict", "step")
        # Mode "step" compares nothing beforehand, so it describes a collective while that is on its way. A record must
        # hold it even if gloo aborts the process in the middle of it.
        self._early = mode != "step" or record_dir is not None
        self._timeout_ms = int(self._timeout_sec * 1000)
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._ring = Ring(RING_EVENTS)
        self._groups: weakref.WeakKeyDictionary[GroupView, _Group] = weakref.WeakKeyDictionary()
        self._named: dict[str, _Group] = {}
        self._inquiry: Inquiry | None = None
        self._writer: RecordWriter | None = None
        self._store: Any = None
        self._works: dict[int, _Work] = {}
        self._waits_in: tuple[str, int] | None = None
        self._left: str | None = None
        self._verdict: DdpstatsError | None = None
        self._silent = False  # after a warning nothing is compared any more
        self._collectives = self._compared = self._skipped = self._steps = 0

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> collective_guard:
        if self.mode == "off":
            return self
        if _active:
            raise ConfigError("a collective_guard is active already; one at a time")
        self._reset()
        _intercept.subscribe(self)
        _active.append(self)
        if dist.is_initialized():
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mode == "off" or self not in _active:
            return
        found: DdpstatsError | None = None
        try:
            if error is None:
                self._finish()
            elif isinstance(error, RuntimeError) and _BROKEN.search(str(error)) and self._verdict is None:
                found = self._explain()
            self._leave(error)
        except DdpstatsError as raised:
            self._leave(raised)
            raise
        finally:
            self._shut()
        if found is not None:
            raise found from error

    def _finish(self) -> None:
        """The last comparison. A rank that left earlier, or runs one collective more, shows here."""
        if not self._compares or self._inquiry is None or self._silent:
            return
        groups = sorted(self._named.values(), key=lambda group: group.view.name)
        self._left = LEFT
        self._leave(None)
        for group in groups:
            if group.exchange is not None:
                self._post_end(group)
        for group in groups:
            if group.exchange is not None:
                self._settle_end(group)

    def _post_end(self, group: _Group) -> None:
        assert group.exchange is not None
        if self.mode == "strict":
            group.exchange.post(group.seq + 1, _END)
        else:
            group.checks += 1
            group.exchange.post(group.checks, self._check_note(group))

    def _settle_end(self, group: _Group) -> None:
        if self.mode == "strict":
            self._settle(group, group.seq + 1)
        else:
            self._settle_checks(group, group.checks)

    def _leave(self, error: BaseException | None) -> None:
        if self._inquiry is None:
            self._end_record(error)
            return
        how = LEFT if error is None else f"{LEFT} by {type(error).__name__}: {str(error)[:300]}"
        last = self._ring.last()
        self._inquiry.leave(
            how,
            {name: group.seq for name, group in self._named.items()},
            None if last is None else _spelled(last),
            {name: self._testify(name) for name in self._named},
        )
        self._end_record(error)

    def _end_record(self, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.write({"end": "left" if error is None else type(error).__name__, "time": time.time()})

    def abandon(self) -> None:
        """Leave without a last comparison; local, and raises nothing of the other ranks'. Idempotent."""
        if self in _active:
            try:
                self._leave(None)
            finally:
                self._shut()

    def _shut(self) -> None:
        _intercept.unsubscribe(self)
        _active.remove(self)
        for group in self._named.values():
            if group.exchange is not None:
                group.exchange.close()
        if self._inquiry is not None:
            self._inquiry.close()
        if self._writer is not None:
            self._writer.close()
        self._works.clear()

    # -- the user's side ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark a step boundary; in mode "step" compare all groups. Every rank must call. Raises as the guard does."""
        self._steps += 1
        if self._verdict is not None:
            raise self._verdict.with_traceback(None)
        if self._inquiry is None or self._silent or not self._compares:
            return
        for group in sorted(self._named.values(), key=lambda group: group.view.name):
            if group.exchange is None:
                continue
            if self.mode == "strict":
                self._settle(group, group.seq)
            else:
                self._post_check(group)
        if self.mode == "step":
            for group in sorted(self._named.values(), key=lambda group: group.view.name):
                if group.exchange is not None:
                    self._settle_checks(group, group.checks)

    @property
    def counters(self) -> GuardCounters:
        """What this guard has seen so far; a frozen copy."""
        return GuardCounters(self._collectives, self._compared, self._skipped, self._steps)

    # -- subscriber of `_intercept` -----------------------------------------------------------------------------------

    def before(self, call: Collective) -> None:
        """Describe, record, and where possible compare, before anything moves."""
        if self._verdict is not None:
            raise self._verdict.with_traceback(None)
        if self._compares and not self._silent and not call.blocking:
            call.timeout_ms = self._timeout_ms
        if self._early:
            self._take_in(call)

    def _take_in(self, call: Collective) -> None:
        with self._lock:
            group = self._groups.get(call.view) or self._meet(call.view)
            event, balance = self._describe(call, group)
        call.seen = group, event, None
        if self._silent or group.exchange is None:
            return
        if call.is_p2p:
            call.seen = group, event, self._begin_message(event, group)
        elif self.mode == "strict":
            group.exchange.post(event.seq, Note(event.digest, balance))
            if call.blocking:
                self._settle(group, event.seq)
        else:
            group.rolling = roll(group.rolling, event.digest)
            group.balance += balance
            if group.checks_settled < group.checks and (group.exchange.is_quick or group.seq % 8 == 0):
                self._glance(group)
            if group.seq % self._check_every == 0:
                self._post_check(group)  # settled when all have posted it, and at `step` at the latest

    def _begin_message(self, event: Event, group: _Group) -> Awaited | None:
        """What is to be compared when the program waits for the message, if anything."""
        if group.messages is None:
            return None
        if event.signature.op == "send":
            group.messages.sent(event)
            return None
        awaited = group.messages.awaited(event)
        if awaited is not None and called_blocking():
            self._settle_message(group, awaited)
            return None
        return awaited

    def _settle_message(self, group: _Group, awaited: Awaited) -> None:
        """Compare a message with what its receiver expects, before it is taken."""
        assert group.messages is not None
        deadline = time.monotonic() + self._timeout_sec
        other = Alarm(awaited.event.group, group.words, (awaited.source, group.view.rank), awaited.event.seq, True)

        def watch() -> None:
            assert self._inquiry is not None
            assert group.messages is not None
            self._heed(self._inquiry)
            if time.monotonic() > deadline or self._inquiry.dead([awaited.source]):
                last = group.messages.last_from(awaited.source)
                self._declare(unmatched(awaited.event, group.view.rank, group.words, last), other)
                raise _Silenced

        try:
            found = group.messages.compare(awaited, watch)
        except _Silenced:
            return
        self._compared += 1
        if found is not None:
            self._declare(found, other)

    def after(self, call: Collective, work: Any) -> None:
        """Wait for a blocking one, so that a rank that never comes is named."""
        if not self._early:
            self._take_in(call)
        if not self._compares or self._silent or work is None:
            return
        group, event, awaited = call.seen
        tensors = call.inputs or call.outputs
        if tensors and not tensors[0].is_cpu:
            return
        if call.blocking:
            self._wait_for(work, group, event)
            return
        with self._lock:
            # What is done and was not waited for may never be (DDP, functional collectives wait in C++), and keeps its
            # tensors alive. It is settled with the next one of its group.
            for key in [key for key, entry in self._works.items() if entry.is_done()]:
                del self._works[key]
            self._works[id(work)] = _Work(work, group, event, awaited)

    def waiting(self, work: Any) -> bool:
        """The program waits for an asynchronous collective, or a message: now it must be settled."""
        with self._lock:
            entry = self._works.pop(id(work), None)
        if entry is None or entry.work is not work or self._silent:
            self._settle_what_is_ready()
            return False
        if entry.awaited is not None:
            self._settle_message(entry.group, entry.awaited)
        if entry.event.group != entry.group.view.name:
            self._wait_for_message(work, entry.group, entry.event)
            return True
        if self.mode == "strict":
            self._settle(entry.group, entry.event.seq)
        if not self._silent:
            self._wait_for(work, entry.group, entry.event)
        return False

    def _settle_what_is_ready(self) -> None:
        """strict: compare what all ranks have posted by now; never waits."""
        if self.mode != "strict" or self._silent or self._verdict is not None:
            return
        for group in list(self._named.values()):
            while group.exchange is not None and group.exchange.is_quick and group.settled < group.seq:
                try:
                    if group.exchange.look(group.settled + 1) is None:
                        break
                except Overrun:
                    pass
                self._settle(group, group.settled + 1)

    # -- describing ---------------------------------------------------------------------------------------------------

    def _describe(self, call: Collective, group: _Group) -> tuple[Event, int]:
        pieces, balance = pieces_of(call)
        frame, in_backward = calling_frame(3)
        name = current_label()
        if name is None and in_backward:
            name = GRADIENTS
        elif name is None and self._infer and (call.inputs or call.outputs):
            reached = label_of(call.inputs[0] if call.inputs else call.outputs[0], frame)
            if reached is not None:
                name, group.keys = reached.path, reached.keys
        if not call.is_p2p:
            group.seq += 1
        signature, digest = describe(call, name)
        peer = None if call.peer is None else call.view.ranks[call.peer]
        event = Event(
            call.view.name if not call.is_p2p else f"{call.view.name} (point-to-point)",
            group.seq,
            signature,
            name,
            site_of(frame),
            digest,
            pieces,
            balance,
            peer,
            call.tag,
            time.time(),
        )
        self._collectives += 1
        self._ring.append(event)
        if self._writer is not None:
            self._writer.write(event.as_dict())
        return event, balance

    def _meet(self, view: GroupView) -> _Group:
        """First sight of a group. Nobody is waited for: ranks may see their groups in different order."""
        if self._store is None:
            self._begin()
        words = "the default group" if view.desc == "default_pg" else f"group {view.name[:24]!r}"
        words = f"{words} of {len(view.ranks)} ranks"
        exchange = None
        if self._compares and len(view.ranks) > 1:
            part = part_of(self._store, f"group/{view.name}")
            exchange = Exchange(part, view.ranks.index(view.rank), len(view.ranks))
        group = self._groups[view] = self._named[view.name] = _Group(view, words, exchange)
        if self.mode == "strict" and exchange is not None:
            group.messages = Messages(part, view.rank)
        if self._writer is not None:
            self._writer.write({"new_group": view.name, "words": words, "ranks": list(view.ranks)})
        return group

    def _begin(self) -> None:
        """Connect, on entering, or at the first collective where there was no process group yet."""
        global _guards
        _guards += 1
        number, rank, world_size = _guards, dist.get_rank(), dist.get_world_size()
        prefix = f"ddpstats/guard/{number}"
        self._store = world_store(prefix, "guard")
        if self._record_dir is not None:
            self._writer = RecordWriter(self._record_dir, rank, world_size)
        if self._compares and world_size > 1:
            stores = self._store, world_store(prefix, "watchdog")
            self._inquiry = Inquiry(stores, rank, self._testify, self._position)

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _settle(self, group: _Group, until: int) -> None:
        """strict: see that all ranks posted the same, up to number ``until``. Waits for them."""
        assert group.exchange is not None
        deadline = time.monotonic() + self._timeout_sec
        while group.settled < until:
            seq = group.settled + 1
            try:
                notes = group.exchange.look(seq)
                if notes is None:
                    self._waits_in = group.view.name, seq
                    notes = group.exchange.wait(seq, self._watch(group, seq, deadline))
            except Overrun:
                self._skipped += 1
                group.settled = seq
                continue
            except _Silenced:
                return
            finally:
                self._waits_in = None
            group.settled = seq
            self._compared += 1
            if not agree(notes):
                self._conclude(self._alarm(group, seq))
                return

    def _check_note(self, group: _Group) -> Note:
        return Note(roll(group.rolling, group.seq), group.balance & ((1 << 64) - 1))

    def _post_check(self, group: _Group) -> None:
        assert group.exchange is not None
        group.checks += 1
        group.exchange.post(group.checks, self._check_note(group))

    def _settle_checks(self, group: _Group, until: int) -> None:
        """step: see that all ranks posted the same rolling digests."""
        assert group.exchange is not None
        deadline = time.monotonic() + self._timeout_sec
        while group.checks_settled < until and not self._silent:
            number = group.checks_settled + 1
            try:
                self._waits_in = group.view.name, group.seq
                notes = group.exchange.wait(number, self._watch(group, group.seq, deadline))
            except Overrun:
                self._skipped += 1
                group.checks_settled = number
                continue
            except _Silenced:
                return
            finally:
                self._waits_in = None
            group.checks_settled = number
            self._compared = self._collectives
            if not agree(notes):
                self._conclude(self._alarm(group, group.seq))
                return

    def _glance(self, group: _Group) -> None:
        """step: settle the oldest comparison if all ranks have posted it by now; never waits."""
        assert group.exchange is not None
        try:
            ready = group.exchange.look(group.checks_settled + 1) is not None
        except Overrun:
            ready = True
        if ready:
            self._settle_checks(group, group.checks_settled + 1)

    def _wait_for(self, work: Any, group: _Group, event: Event) -> None:
        """Wait for what was issued, looking up between slices."""
        if _intercept.wait_within(work, _SLICE_SEC):
            return
        deadline = time.monotonic() + self._timeout_sec - _SLICE_SEC
        watch = self._watch(group, event.seq, deadline, waited_for=event)
        self._waits_in = group.view.name, event.seq
        try:
            while not _intercept.wait_within(work, _SLICE_SEC):
                watch()
        except _Silenced:
            return  # the caller waits on, as without a guard
        except DdpstatsError:
            _abandoned.append(work)  # the memory that it may still write to
            raise
        finally:
            self._waits_in = None

    def _watch(self, group: _Group, seq: int, deadline: float, waited_for: Event | None = None) -> Callable[[], None]:
        """What a rank does now and then while it waits for ``seq``: look for alarms, and for ranks that cannot come.

        ``waited_for``: what it waits for was issued without being compared, so the waiting ranks compare it now.
        """

        def watch() -> None:
            inquiry = self._inquiry
            if inquiry is None:
                return
            self._heed(inquiry)
            if time.monotonic() > deadline or self._cannot_come(group, seq):
                self._conclude(self._alarm(group, seq, until=True))
                raise _Silenced
            if waited_for is not None and inquiry.another_waits_elsewhere(waited_for, group.view.ranks):
                self._conclude(self._alarm(group, seq))
                raise _Silenced

        return watch

    def _wait_for_message(self, work: Any, group: _Group, event: Event) -> None:
        try:
            _intercept.wait_once(work, self._timeout_sec)
        except RuntimeError as error:
            if not _BROKEN.search(str(error)):
                raise
            peers = () if event.peer is None else (event.peer,)
            last = (
                group.messages.last_from(event.peer) if group.messages is not None and event.peer is not None else None
            )
            alarm = Alarm(event.group, group.words, (*peers, group.view.rank), event.seq, True)
            self._declare(unmatched(event, group.view.rank, group.words, last), alarm)
            raise

    def _heed(self, inquiry: Inquiry) -> None:
        """Take part in an alarm that is on."""
        alarm = inquiry.alarm()
        if alarm is not None:
            self._conclude(alarm)
            raise _Silenced

    def _cannot_come(self, group: _Group, seq: int) -> bool:
        """Whether a rank that this one waits for has died, or left before this collective."""
        inquiry = self._inquiry
        assert inquiry is not None
        others = [rank for rank in group.view.ranks if rank != group.view.rank]
        gone = {}
        if inquiry.someone_left():
            gone = {rank: left for rank in others if (left := inquiry.has_left(rank)) is not None}
        if any(left.get("counts", {}).get(group.view.name, 0) < seq for left in gone.values()):
            return True
        return bool(inquiry.dead([rank for rank in others if rank not in gone]))

    # -- concluding ---------------------------------------------------------------------------------------------------

    def _alarm(self, group: _Group, seq: int, until: bool = False) -> Alarm:
        return Alarm(group.view.name, group.words, group.view.ranks, seq, until)

    def _position(self) -> str:
        last = self._ring.last()
        return "" if last is None else _spelled(last)

    def _testify(self, name: str) -> Testimony:
        """What this rank knows of itself about one group. Called by any thread."""
        view = dist.get_rank() if dist.is_initialized() else -1
        group, last = self._named.get(name), self._ring.last()
        events = self._ring.of(name)[-self._testified :]
        return Testimony(
            view,
            events,
            {event.seq: event.balance for event in events if event.balance},
            0 if group is None else group.seq,
            self._waits_in,
            None if last is None else _spelled(last),
            self._left,
            False,
            main_stack(),
            () if group is None else group.keys,
        )

    def _conclude(self, alarm: Alarm) -> None:
        """Come to the verdict that all ranks come to; raise or log it."""
        assert self._inquiry is not None
        self._raise_or_warn(self._inquiry.raise_alarm(alarm), alarm)

    def _declare(self, finding: Finding, alarm: Alarm) -> None:
        """A verdict that this rank can give alone."""
        assert self._inquiry is not None
        self._raise_or_warn(self._inquiry.declare(finding, alarm), alarm)

    def _raise_or_warn(self, finding: Finding, alarm: Alarm) -> None:
        error = _error_of(finding, alarm)
        if self._warn and isinstance(error, CollectiveMismatch):
            self._silent = True
            log.warning("%s", error)
            return
        self._verdict = error
        raise error

    def _explain(self) -> DdpstatsError | None:
        """A C++ wait failed: who is missing? None where nothing can be said."""
        last = self._ring.last()
        if self._inquiry is None or last is None or last.group not in self._named:
            return None
        group = self._named[last.group]
        alarm = self._inquiry.alarm() or self._alarm(group, group.seq, until=True)
        finding = self._inquiry.raise_alarm(alarm)
        return _error_of(finding, alarm) if finding.by_rank or finding.missing else None


class _Silenced(Exception):  # no error: a way out
    """A mismatch was warned of, so nothing is waited for any more."""


_active: list[collective_guard] = []
_abandoned: list[Any] = []


def _error_of(finding: Finding, alarm: Alarm) -> DdpstatsError:
    if finding.kind == MISMATCH:
        return CollectiveMismatch(
            finding.message,
            group=alarm.words,
            seq=finding.seq,
            by_rank=finding.by_rank,
            culprit_ranks=finding.culprits,
            missing_ranks=finding.missing,
        )
    return RankMissing(finding.message, missing_ranks=finding.missing, group=alarm.words)


def _spelled(event: Event) -> str:
    return f"number {event.seq} of group {event.group!r}, {event}, at {event.site}"


def _check_choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not understood; legal values: {', '.join(map(repr, legal))}")
