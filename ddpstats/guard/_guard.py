"""The guard: watches the collectives of this process and compares them with those of the other ranks.

What happens to a collective, in the order of the code:

1. It is described: signature, label, call site, its number in its group. It goes into the ring, and into the record if
   there is one. step (and what is asynchronous in strict): the other ranks of this host are told in shared memory, and
   where a neighbour has told of something else, it is not issued.
2. strict: its note is posted. A blocking one waits for all ranks' notes, so that nothing moves before all agree; others
   are settled when the program waits for them, or at the next blocking one of their group.
   step: its digest is rolled into the group's; the rolling digest is compared at `step()` and every N collectives.
3. `Guard.after` waits for a blocking collective, in slices, between which it looks for alarms and for ranks that left.

What is left is compared (`conclude`) when the process group is destroyed, on leaving, and when the program of a guard
that nobody wrote into it ends (`_ending`).

`_session` keeps what belongs to one life of the process group, `_comparing` compares, waits and comes to verdicts.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ContextDecorator
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from ddpstats._base import config
from ddpstats._base.arguments import check_choice, check_count
from ddpstats._base.compiled import breaks_graph
from ddpstats._observe import collectives
from ddpstats._observe.c10d_operators import Collective, GroupView
from ddpstats._observe.user_frames import called_by_c10d, calling_frame, main_stack, site_of
from ddpstats.errors import CollectiveMismatch, ConfigError, DdpstatsError
from ddpstats.guard import _ending
from ddpstats.guard._buckets import with_parameters
from ddpstats.guard._comparing import Comparing, Standing, Unfinished, is_broken
from ddpstats.guard._describe import describe, pieces_of
from ddpstats.guard._ending import AFTER_ERROR_SEC
from ddpstats.guard._events import BY_TORCH, Event, Ring, label_word
from ddpstats.guard._failure_agreement import MESSAGES
from ddpstats.guard._p2p import Awaited
from ddpstats.guard._records import RecordWriter
from ddpstats.guard._session import Group, Session, spelled
from ddpstats.guard._status import DOUBT, LEFT, GuardFinding, RankStatus
from ddpstats.guard._summary import RECORDED, TO_RUN, GuardCounters, Tally, last_line
from ddpstats.guard.labels import current_label
from ddpstats.guard.labels._evidence import evidence_of
from ddpstats.guard.labels._infer import Chain, Inferred, infer

MismatchPolicy = Literal["raise", "warn"]

RING_EVENTS = 10_000
# Operations that combine what must be the same thing on all ranks. With others the names may legally be each rank's
# own: shards that are gathered, what a root sends. Functions that are known to reduce named stats may gather them:
# espnet sums what it has all-gathered.
_COMBINING = frozenset(
    {
        *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_reduce_coalesced", "reduce_scatter_tensor_coalesced"),
    }
)
_GATHERING = "all_gather"
_REPORTED_EVENTS = 2000  # of one group
_CONTEXT_EVENTS = 64  # before the last on which ranks agreed: which names have met there before
_NEVER = 1 << 62
_STACK_FRAMES = 6  # of the main thread, for a rank that is somewhere else
_KEPT_WORKS = 1024  # messages that nobody ever waits for would keep their tensors

log = logging.getLogger("ddpstats")


class _Seen(NamedTuple):
    """What is known of a collective once it is described. ``awaited``: of a message that is still to be compared."""

    group: Group
    event: Event
    awaited: Awaited | None = None


class _Work(NamedTuple):
    """Something that runs, and that the program will wait for."""

    work: Any
    seen: _Seen

    def is_done(self) -> bool:
        """A message is never taken for done: its receiver still has to compare it."""
        return self.seen.event.peer is None and self.seen.awaited is None and bool(self.work.is_completed())


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
    one of its group, at `step` or on leaving. Messages between two ranks are compared before they are received.

    Example::

        with ddpstats.collective_guard("strict"):
            train()      # rank 0: all_reduce(stats["snr"])   rank 1: all_reduce(stats["l1"])
        # both: CollectiveMismatch: ... rank 0: all_reduce(float32[], sum) 'snr' at train.py:12 in train ...
    """

    def __init__(
        self,
        mode: config.GuardMode = "step",
        *,
        on_mismatch: MismatchPolicy = "raise",
        infer_labels: bool = True,
        check_every: int = 64,
        timeout_sec: float | None = None,
        record_dir: str | Path | None = None,
    ) -> None:
        check_choice("mode", mode, get_args(config.GuardMode))
        check_choice("on_mismatch", on_mismatch, get_args(MismatchPolicy))
        check_count("check_every", check_every, 1)
        if mode == "record" and record_dir is None:
            raise ConfigError("mode='record' needs record_dir=, where the records are written")
        self.mode, self._warn, self._infer = mode, on_mismatch == "warn", infer_labels
        self._check_every = check_every if mode == "step" else _NEVER
        self._timeout_sec = config.timeout_sec(timeout_sec)
        self._record_dir = record_dir
        self._compares = mode in ("strict", "step")
        self._timeout_ms = int(self._timeout_sec * 1000)
        self._lock = threading.RLock()
        self._seen_before = 0, Tally()  # it gave way to another guard
        self._yields = False  # to a guard of the program's own, and comes back after it
        self._outer: collective_guard | None = None
        self._reset()

    def _reset(self) -> None:
        self._ring = Ring(RING_EVENTS)
        self._standing = Standing()
        self._session: Session | None = None
        self._comparing: Comparing | None = None  # None where there is nothing to compare, or nobody to compare with
        self._writer: RecordWriter | None = None
        self._works: dict[int, _Work] = {}
        self._silenced: set[Chain] = set()  # places whose names are each rank's own
        self._left: str | None = None
        self._found_late: DdpstatsError | None = None  # by the last comparison

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> collective_guard:
        if self.mode == "off":
            return self
        if _active and not _active[0]._yields:
            raise ConfigError("a collective_guard is active already; one at a time")
        if _active:
            self._outer = _active[0]
            self._outer.conclude()
            self._outer.abandon()
        self._reset()
        collectives.subscribe(self)
        _ending.before_destroying(self._at_destroy)
        _active.append(self)
        try:
            if dist.is_initialized():
                self._begin()
        except BaseException:  # a store that cannot do what is needed, or does not answer
            self._shut()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mode == "off" or self not in _active:
            return
        found: DdpstatsError | None = None
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # the usual end of a script
        if self._session is not None and self._session.is_concluded:
            self._left = LEFT  # all was said when the process group was destroyed
        try:
            if error is None:
                self._finish()
            elif is_broken(error) and self._comparing is not None and self._standing.verdict is None:
                found = self._comparing.explain(self._ring.last())
            if self._left is None:
                self._leave(error)
        except DdpstatsError as raised:
            self._leave(raised)
            raise
        finally:
            self._shut()
            self.say_end()
        if found is not None:
            raise found from error

    def _finish(self) -> None:
        """The last comparison: a rank that left earlier, or runs one collective more, shows here."""
        session = self._open_session()
        if session is None or self._comparing is None:
            return
        self._left = LEFT
        try:
            self._comparing.post_ends()  # first: who sees that this rank has left looks for them
            self._leave(None)
            self._comparing.finish()
            session.linger()
        except DdpstatsError:
            raise
        except (RuntimeError, OSError) as error:  # the rank that serves the store has seen our last note, and is gone
            log.debug("the store went away during the last comparison: %s", error)

    def conclude(self, error: BaseException | None = None, timeout_sec: float | None = None) -> None:
        """The last comparison of this process group: the program destroys it, or has come to its own end.

        Ranks may come here at different times, and some never. Where the comparison cannot go to its end, the last line
        of the guard says so; only what was found is raised. ``error``: what the program itself ends with.
        """
        session = self._open_session()
        if session is None or self._comparing is None:
            return
        session.is_concluded = True
        self._left = LEFT if error is None else f"{LEFT} by {type(error).__name__}: {str(error)[:300]}"
        try:
            with self._comparing.ending_within(self._timeout_sec if timeout_sec is None else timeout_sec):
                self._comparing.post_ends()
                self._leave(error)
                self._comparing.finish()
            session.linger()
        except Unfinished as reason:
            session.unfinished = str(reason)
        except DdpstatsError as found:
            self._found_late = found
            if error is None or isinstance(found, CollectiveMismatch):
                raise
        except (RuntimeError, OSError) as reason:
            session.unfinished = f"the store does not answer ({str(reason).strip().splitlines()[0][:200]})"

    def verdict_at_end(self, error: BaseException | None) -> DdpstatsError | None:
        """`conclude` where the program has ended, by ``error`` or without: what was found, then or before."""
        if isinstance(error, KeyboardInterrupt):
            return None
        try:
            broken = error is not None and is_broken(error) and self._standing.verdict is None
            if broken and self._comparing is not None:
                return self._comparing.explain(self._ring.last())
            self.conclude(error, None if error is None else AFTER_ERROR_SEC)
        except DdpstatsError as found:
            return found
        return self._found_late

    def _at_destroy(self, group: Any) -> None:
        if self._session is not None and not self._session.is_over() and group is dist.group.WORLD:
            error = sys.exc_info()[1]
            try:
                self.conclude(error, None if error is None else AFTER_ERROR_SEC)
            except DdpstatsError:
                if not self._yields or threading.main_thread().is_alive():
                    raise  # else an exit handler has called, whom nobody catches: `_ending` tells what was found

    def _open_session(self) -> Session | None:
        """The one whose last comparison is still to come and can come, if there is one."""
        session, standing = self._session, self._standing
        if self._comparing is None or session is None or standing.silent or standing.verdict is not None:
            return None
        return session if not session.is_concluded and session.is_reachable() else None

    def _leave(self, error: BaseException | None) -> None:
        how = LEFT if error is None else f"{LEFT} by {type(error).__name__}: {str(error)[:300]}"
        if self._session is not None:
            self._session.leave(how, self._ring.last(), lambda name: self._status_in(name, error is not None))
        if self._writer is not None:
            self._writer.write({"end": "left" if error is None else type(error).__name__, "time": time.time()})

    @property
    def has_begun(self) -> bool:
        """Whether there was a process group."""
        return self._session is not None

    def preemptible(self) -> collective_guard:
        """This guard, made to give way to one that the program itself enters: for those that nobody wrote into it."""
        self._yields = True
        return self

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave without a last comparison; local, and raises nothing of the other ranks'. Idempotent."""
        if self in _active:
            try:
                if self._left is None:
                    self._leave(error)
            finally:
                seen, tally = self._counted()
                self._seen_before = self._seen_before[0] + seen, self._seen_before[1] + tally
                self._shut()

    def _shut(self) -> None:
        collectives.unsubscribe(self)
        _ending.before_destroying(None)
        _active.remove(self)
        if self._session is not None:
            self._session.close()
        if self._writer is not None:
            self._writer.close()
        self._works.clear()
        if self._outer is not None:
            outer, self._outer = self._outer, None
            outer.__enter__()

    # -- the user's side ----------------------------------------------------------------------------------------------

    @breaks_graph
    def step(self) -> None:
        """Mark a step boundary; in mode "step" compare all groups. Every rank must call. Raises as the guard does."""
        self._standing.steps += 1
        if self._standing.verdict is not None:
            raise self._standing.verdict.with_traceback(None)
        if self._comparing is not None and not self._standing.silent and not self._is_over():
            self._comparing.step()

    @property
    def counters(self) -> GuardCounters:
        """What this guard has seen so far; a frozen copy."""
        return self._counters(*self._counted())

    def _counted(self) -> tuple[int, Tally]:
        past = self._standing.past
        return self._standing.collectives, past if self._session is None else past + self._session.tally()

    def _counters(self, collectives: int, tally: Tally) -> GuardCounters:
        return GuardCounters(
            collectives,
            tally.compared,
            collectives - tally.compared,
            self._standing.steps,
            self.mode,
            tally.not_compared,
            len(tally.agreeing),
        )

    def last_line(self) -> tuple[int, str] | None:
        """(level, text) of what there is to say at the end; None on all ranks but rank 0."""
        if (str(self._session.rank) if self._session is not None else os.environ.get("RANK", "0")) != "0":
            return None
        collectives, tally = self._seen_before if self._yields else self._counted()
        amiss, line = last_line(
            self._counters(collectives, tally), self._nothing(), self._verdict_name(), _text_or_none(self._record_dir)
        )
        return logging.WARNING if amiss else logging.INFO, line

    def say_end(self) -> None:
        """Log the last line; of guards with nothing to compare the first alone, for there may be one at each step."""
        said = self.last_line()
        if said is None or (said[0] == logging.WARNING and said[1] in _said):
            return
        _said.add(said[1])
        log.log(said[0], "%s", said[1])

    def _verdict_name(self) -> str:
        if self._standing.silent:
            return "a mismatch that was warned of"
        return "" if self._standing.verdict is None else type(self._standing.verdict).__name__

    def _nothing(self) -> str:
        """Why there was nothing to compare, where that is known."""
        if self.mode == "record":
            return RECORDED
        if self._session is None:
            return f"no process group was made. {TO_RUN}"
        return f"the program runs on one rank. {TO_RUN}" if self._session.agreement is None else ""

    # -- subscriber of `collectives` -----------------------------------------------------------------------------------

    def before(self, call: Collective) -> None:
        """Describe, record, and where possible compare, before anything moves."""
        if self._standing.verdict is not None:
            raise self._standing.verdict.with_traceback(None)
        if self._compares and not self._standing.silent and not call.blocking:
            call.timeout_ms = self._timeout_ms
        self._take_in(call)

    def _take_in(self, call: Collective) -> None:
        with self._lock:
            group = self._group_of(call.view)
            event = self._describe(call, group)
        call.subscriber_state = _Seen(group, event)
        group.sent += event.signature.op == "send"
        group.received += event.signature.op == "recv"
        if self._standing.silent or group.exchange is None or self._comparing is None:
            return
        if call.is_p2p:
            call.subscriber_state = _Seen(group, event, self._begin_message(event, group))
            return
        if self.mode == "step" or not call.blocking:
            self._comparing.foretell(group, event)
        if self.mode == "strict":
            self._comparing.post(group, event)
            if call.blocking:
                self._comparing.settle(group, event.seq)
        else:
            self._comparing.take_in(group, event, self._check_every)

    def _begin_message(self, event: Event, group: Group) -> Awaited | None:
        """What is to be compared when the program waits for the message, if anything."""
        if group.messages is None or self._comparing is None:
            return None
        if event.signature.op == "send":
            self._comparing.post_message(group, event)
            return None
        awaited = group.messages.awaited(event)
        if awaited is not None and called_by_c10d("recv", "recv_object_list"):
            self._comparing.settle_message(group, awaited)
            return None
        return awaited

    def after(self, call: Collective, work: Any) -> None:
        """Wait for a blocking one, so that a rank that never comes is named."""
        if self._comparing is None or self._standing.silent or work is None:
            return
        tensors = call.inputs or call.outputs
        if tensors and not tensors[0].is_cpu:
            return
        seen: _Seen = call.subscriber_state
        if call.blocking:
            self._comparing.wait_for(work, seen.group, seen.event)
            return
        with self._lock:
            # What is done and was not waited for may never be (DDP, functional collectives wait in C++), and keeps its
            # tensors alive. It is settled with the next one of its group.
            for key in [key for key, entry in self._works.items() if entry.is_done()]:
                del self._works[key]
            while len(self._works) >= _KEPT_WORKS:
                del self._works[next(iter(self._works))]
            self._works[id(work)] = _Work(work, seen)

    def waiting(self, work: Any, limited: bool) -> bool:
        """The program waits for an asynchronous collective, or a message: now it must be settled.

        Where it waits under a timeout of its own, that holds, and what is not there yet is settled later.
        """
        comparing = self._comparing
        if comparing is None or self._standing.silent:
            return False
        entry = None
        if not limited:
            with self._lock:
                entry = self._works.pop(id(work), None)
        if entry is None or entry.work is not work:
            if self.mode == "strict" and self._standing.verdict is None:
                comparing.settle_what_is_ready()
            return False
        group, event, awaited = entry.seen
        if awaited is not None:
            comparing.settle_message(group, awaited)
        if event.group != group.name:
            comparing.wait_for_message(work, group, event)
            return True
        if self.mode == "strict":
            comparing.settle(group, event.seq)
        if not self._standing.silent:
            comparing.wait_for(work, group, event)
        return False

    # -- describing ---------------------------------------------------------------------------------------------------

    def _describe(self, call: Collective, group: Group) -> Event:
        pieces, balance = pieces_of(call)
        frame, by_torch, is_api = calling_frame(3)
        name, inferred = current_label(), None
        if name is None and by_torch:
            name = BY_TORCH
        elif name is None and self._infer and is_api and frame is not None:
            inferred = _inferred(call, frame)
            name = None if inferred is None else inferred.path
        if not call.is_p2p:
            group.seq += 1
        signature, digest = describe(call)
        event = Event(
            group.name if not call.is_p2p else f"{group.name}{MESSAGES}",
            group.seq,
            signature,
            name,
            0 if inferred is not None and inferred.chain in self._silenced else label_word(name),
            site_of(frame),
            digest,
            pieces,
            balance,
            None if call.peer is None else call.view.ranks[call.peer],
            call.tag,
            time.time(),
            told=None if inferred is None else partial(evidence_of, inferred),
        )
        self._standing.collectives += 1
        self._ring.append(event)
        if self._writer is not None:
            self._writer.write_event(event)
        return event

    def _group_of(self, view: GroupView) -> Group:
        session = self._session
        group = None if session is None else session.find(view)
        if group is not None:
            return group
        if session is None or session.is_over():
            session = self._begin()
        group = session.meet(view)
        if self._writer is not None:
            self._writer.write({"new_group": group.name, "words": group.words, "ranks": list(view.ranks)})
        return group

    def _begin(self) -> Session:
        """Connect: on entering, at the first collective, or at the first one of another process group."""
        if self._session is not None:
            self._session.close()
            self._works.clear()
            self._ring = Ring(RING_EVENTS)  # numbers begin anew
            self._left = None
            self._standing.past += self._session.tally()
        session = Session(self._compares, self._status_in, self._position, self._heard, self._timeout_sec)
        self._session = session
        if self._record_dir is not None and self._writer is None:
            self._writer = RecordWriter(self._record_dir, session.rank, dist.get_world_size(), session.run)
        self._comparing = None
        if session.agreement is not None:
            self._comparing = Comparing(
                session,
                self._standing,
                strict=self.mode == "strict",
                warn=self._warn,
                timeout_sec=self._timeout_sec,
            )
        return session

    def _is_over(self) -> bool:
        return self._session is not None and self._session.is_over()

    # -- telling the others -------------------------------------------------------------------------------------------

    def _position(self) -> str:
        last = self._ring.last()
        return "" if last is None else spelled(last)

    def _status_in(self, name: str, in_full: bool = True) -> RankStatus:
        """What this rank knows of itself about one group. Called by any thread. ``in_full`` takes a while."""
        session, last = self._session, self._ring.last()
        group = None if session is None else session.named.get(name)
        events: Sequence[Event] = self._ring.of(name)
        if group is not None:  # what is in question comes after what was agreed on
            first = group.agreed - _CONTEXT_EVENTS
            events = [event for event in events if event.seq >= first][:_REPORTED_EVENTS]
            if in_full:
                events = with_parameters(events, BY_TORCH, group.view.name)
        return RankStatus(
            -1 if session is None else session.rank,
            events,
            {event.seq: event.balance for event in events if event.balance},
            0 if group is None else group.seq,
            self._standing.waits_in(name),
            None if last is None else spelled(last),
            self._left,
            False,
            main_stack(_STACK_FRAMES),
        )

    def _heard(self, finding: GuardFinding) -> None:
        """A verdict has come. Labels that may differ are not compared at their places any more, on any rank."""
        if finding.kind == DOUBT and self._session is not None:
            group = self._session.named.get(finding.group)
            if group is not None and group.view.rank == min(group.view.ranks):
                log.warning("%s", finding.message)
        for event in self._ring.of(finding.group):
            if event.seq in finding.doubts:
                event.word = 0
                if isinstance(event.told, partial):
                    self._silenced.add(event.told.args[0].chain)


def _inferred(call: Collective, frame: FrameType) -> Inferred | None:
    """The label of what a collective combines, if the text of the program gives it one."""
    if call.op in _COMBINING and call.inputs:
        return infer(call.inputs[0], frame)
    if call.op == _GATHERING and call.inputs:
        found = infer(call.inputs[0], frame)
        return found if found is not None and found.chain.is_known else None
    return None


_active: list[collective_guard] = []
_said: set[str] = set()


def _text_or_none(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
