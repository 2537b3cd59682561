"""How one rank waits for the others, and comes to the verdict that all come to: to raise it, to log it, or to go on.

Every wait has a deadline, and is cut into slices: in between, a rank looks for alarms that others raised, and for ranks
that died or left. Whatever it finds goes through `failure_agreement`, and is the same error on every rank.

Messages between two ranks: the n-th send and the n-th receive of two ranks and one tag belong together
(`MessageNumbers`). As a message begins, ranks of one host publish a digest of it in shared memory. The later
one sees before anything moves that the other rank's digest differs; the store is not asked. Where the wait
for a message fails, both ranks report their last messages, and `diagnosis` finds what is wrong.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ddpstats._base.text import ranks_text
from ddpstats._observe import collectives
from ddpstats._observe.frames import main_position
from ddpstats._observe.operators import Collective
from ddpstats._ranks.failure import LOST, nccl_reason
from ddpstats._ranks.gloo import done_within
from ddpstats._ranks.store import GLANCE_SEC, STORE_ERRORS, StoreSilent, shared_poll, wait_for
from ddpstats.errors import CollectiveMismatch, DdpstatsError, RankMissing
from ddpstats.guard.diagnosis import MISMATCH, MISSING, Alarm, GuardFinding, message_place
from ddpstats.guard.event import MESSAGES, Event, event_of, stable_hash
from ddpstats.guard.group import Group, GuardState, IssuedCall, Limit, Session, Settings
from ddpstats.guard.printing import defer_sigterm, end_process, leave_running, print_message, print_once

_SLICE_SEC = 0.2
_SLICE = timedelta(seconds=_SLICE_SEC)
_WAITS_IN = ("ddpstats.", "torch._", "torch.autograd", "torch.distributed", "torch.nn.parallel", "torch.ops")
_TIMED_OUT = re.compile(r"timed out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
_REFUSED = re.compile(r"\[enforce fail at ")
_REFUSED_SEC = 2.0  # for the other ranks to begin a collective whose arguments gloo has refused here
_NOTICE_SEC = 0.5  # for a rank whose own timeout has passed to report that, once it has closed its connections
_PASSED_SEC = 5.0  # for a collective that this rank has ended without: its caller may have given it a timeout
_QUIET_SEC = 1.0  # without a collective: the program may wait for a device
_UNRAISED_SEC = 1.0  # for the program to raise the verdict before the watchdog prints it
_STUCK_SEC = 10.0  # the main thread does not move, before the watchdog ends the process
_SHORT_SEC = 60.0  # a timeout of a group that may be meant to pass

log = logging.getLogger("ddpstats")


class Silenced(Exception):  # no error: a way out
    """A mismatch was warned of, so nothing is waited for any more."""


class GivenUp(Silenced):
    """Torch's own timeout ends a collective of the group: torch raises its error, and no more is compared there."""


class Unfinished(Exception):  # no error: a way out
    """The last comparison cannot go to its end; the text says why."""


class Verdicts:
    """The verdicts of one session."""

    def __init__(self, session: Session, state: GuardState, settings: Settings) -> None:
        assert session.agreement is not None
        self._session, self.agreement, self._state = session, session.agreement, state
        self._warn, self._strict, self.timeout_sec = settings.warn, settings.mode == "strict", settings.timeout_sec
        self.ends_by: float | None = None  # the program has ended: until when others are waited for
        self.has_ended = False  # this rank has posted its ends: it issues nothing more that is compared
        self.passed_on: BaseException | None = None  # torch's own error of a message, which the program gets
        self._lock = threading.Lock()  # of the verdict
        self._concluded = 0.0  # when this rank has come to its verdict
        self._device_never_ends = False  # a device works on what is in question, which never ends
        self._position: Any = None  # of the main thread, and since when it is there
        self._there_since = 0.0
        self._seen, self._quiet_since = 0, time.monotonic()  # the program's collectives so far, and since when
        self.agreement.on_look = self.watch_idle_program

    # -- coming to a verdict ------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Come to the verdicts of all alarms that are on: of groups, too, which this rank is no member of."""
        while not self._state.silent and (alarm := self.agreement.alarm()) is not None:
            self.await_verdict(alarm)

    def await_verdict(self, alarm: Alarm) -> None:
        """Come to the verdict that all ranks come to; raise or log it."""
        has_time = not alarm.overdue and self.ends_by is None  # a difference was seen, and no rank has waited for it
        with defer_sigterm():
            finding = self.agreement.raise_alarm(alarm, self.timeout_sec if has_time else 0.0)
            self._raise_or_warn(finding, alarm)

    def differ(self, group: Group, seq: int, tentative: bool = False) -> None:
        """Come to the verdict on ranks that differ, or whose labels do. Raises `GivenUp` where that is no wonder."""
        if self.has_given_up(group):
            raise GivenUp
        self.await_verdict(alarm_of(group, seq, tentative=tentative))

    def conclude_alone(self, group: Group, seq: int, error: BaseException) -> None:
        """Raise what this rank can conclude where the store does not answer; return where that is no error."""
        alarm = alarm_of(group, seq, overdue=True)
        finding = self.agreement.without_store(alarm, error)
        if self.ends_by is not None and finding.kind == MISSING:
            raise Unfinished("the store does not answer")
        try:
            self._raise_or_warn(finding, alarm)
        except DdpstatsError as verdict:
            verdict.__context__ = error.__context__  # the program's; how the store was asked helps no reader
            raise

    def explain(self, last: Event | None, group: Group | None = None, overdue: bool = True) -> DdpstatsError | None:
        """Return the verdict on a wait that has failed: what differs or who is missing; None where nothing is known.

        ``last``: this rank's last event. ``overdue``: the others have had time to come.
        """
        group = group or (self._session.named.get(last.group.removesuffix(MESSAGES)) if last is not None else None)
        if group is None:
            return None
        alarm = self.agreement.alarm() or alarm_of(group, group.seq, overdue, tentative=True)
        try:
            # It waited until now. A rank that did not wait there is the missing one.
            with self._state.note_wait(group, group.seq):
                self.await_verdict(alarm)
        except DdpstatsError as verdict:
            return verdict
        return None

    def _raise_or_warn(self, finding: GuardFinding, alarm: Alarm) -> None:
        if not finding.is_error:
            return
        error = _error_of(finding, alarm)
        self._session.note(finding.group, finding.seq, finding.kind == MISMATCH)
        self._state.recording.alarm("guard", finding.message)
        if self._warn and isinstance(error, CollectiveMismatch):
            if not self._state.silent:
                self._state.silent = True
                log.warning("%s", error)
            return
        with self._lock:
            if self._state.verdict is None:  # otherwise another thread has come to it meanwhile
                rank, members = self.agreement.rank, self.agreement.members
                printer = rank if finding.printer is None else finding.printer
                print_once(error, rank, printer, lambda: bool(members.dead([printer])))
                group = self._session.named.get(finding.group)
                call = None if group is None else group.newest
                self._device_never_ends = call is not None and not call.is_on_host and call.entry[1] >= finding.seq
                self._concluded = time.monotonic()
                self._state.verdict = error
        if self.agreement.is_watchdog():
            raise error
        if finding.readers > 1:  # none where this rank has concluded alone, as the store does not answer
            self.agreement.linger(finding.readers)
        self._state.raise_verdict()

    # -- for a program that waits where no guard waits with it --------------------------------------------------------

    def watch_idle_program(self) -> None:
        """Come to a verdict, and print it, where the program waits elsewhere. Called by the watchdog now and then.

        It may wait for a device (``loss.item()``), for a collective that never ends, or in C++. What the program raises
        by itself within a second is left to it.
        """
        state, now = self._state, time.monotonic()
        if state.silent:
            return
        if state.verdict is not None:
            self._watch_verdict(state.verdict, now)
            return
        if state.waits or state.collectives != self._seen:
            self._seen, self._quiet_since = state.collectives, now
        if not self.is_idle():
            return
        # Also what it raises where the guard was left meanwhile, and what the ranks of this host share is closed.
        with suppress(DdpstatsError, Silenced, Unfinished, *STORE_ERRORS):
            if self.agreement.failure.verdict is not None:  # read by the watchdog
                self.catch_up()
            for group in self._session.groups():
                if not state.silent:
                    self._check_device_wait(group)

    def _watch_verdict(self, verdict: DdpstatsError, now: float) -> None:
        """Print the verdict where the program has not raised it within a second, and report that it is there."""
        position = main_position()
        if position != self._position:
            self._position, self._there_since = position, now
        if not self._state.is_raised:
            if now < self._concluded + _UNRAISED_SEC:
                return
            print_message(verdict, is_early=True)
            if self._device_never_ends and now > self._there_since + _STUCK_SEC and self._state.ends_process:
                end_process(1)
        with suppress(*STORE_ERRORS), self.agreement.store.within(GLANCE_SEC):
            self.agreement.count_as_reader()

    def is_idle(self) -> bool:
        """Return, to the watchdog, whether the program has begun no collective for a while and waits in none."""
        return self.agreement.is_watchdog() and time.monotonic() > self._quiet_since + _QUIET_SEC

    def _check_device_wait(self, group: Group) -> None:
        """Raise the alarm where a rank cannot come any more to this one's newest collective, if that is on a device.

        In host memory torch itself ends the wait, and the program may catch that. A rooted one may be done on this
        rank before others come to it.
        """
        call = group.newest
        if call is None or call.is_on_host or group.exchange is None:
            return
        event, seq, _ = call.entry
        cannot_end = bool(self._cannot_come(group, seq, is_on_host=False))
        if event.signature.root is None and time.monotonic() > call.issued + group.limit(call.timeout_ms).seconds:
            cannot_end = cannot_end or bool(self._behind(group, seq, is_on_host=False))
        if cannot_end or self._waits_elsewhere(group, call):
            with self._state.note_wait(group, seq):
                self.await_verdict(alarm_of(group, seq, overdue=cannot_end))

    # -- a timeout of the program's own -------------------------------------------------------------------------------

    def give_up(self, group: Group) -> None:
        """Compare no collective of the group any more, here and on its other ranks; never waits for long."""
        group.is_given_up = True
        self.agreement.store.post_later(f"given up/{group.name}", str(self.agreement.rank))

    def has_given_up(self, group: Group) -> bool:
        """Return whether torch's own timeout has ended a collective of the group on some rank."""
        if not group.is_given_up:
            with suppress(*STORE_ERRORS), self.agreement.store.within(GLANCE_SEC):
                group.is_given_up = self.agreement.store.check([f"given up/{group.name}"])
        return group.is_given_up

    def note_failure(self, call: Collective, error: RuntimeError) -> None:
        """Note that a collective has failed while it was issued: torch's own barrier with a timeout does so."""
        group = self._session.find(call.view)
        if group is not None and ends_by_timeout(str(error)):
            self.give_up(group)

    def is_own_timeout(self, error: RuntimeError, group: Group, limit: Limit) -> bool:
        """Return whether the program's own timeout has passed, here or on a rank that closed its connections then."""
        if not limit.is_own or group.is_given_up:
            return group.is_given_up
        if _TIMED_OUT.search(str(error)):
            return True
        others = [rank for rank in group.view.ranks if rank != group.view.rank]
        wait_for(lambda: self.has_given_up(group) or bool(self.agreement.members.dead(others)), _NOTICE_SEC)
        return group.is_given_up

    # -- waiting, with a deadline and in slices -----------------------------------------------------------------------

    def wait_for(self, work: Any, issued: IssuedCall) -> bool:
        """Wait for a collective that was issued, looking up between slices; for no longer than the call would.

        False where the caller has to wait on, as without a guard.
        """
        group, entry = issued.group, issued.entry
        try:
            is_done = done_within(work, _SLICE, collectives.original_wait)
            if is_done or group.is_given_up:
                return is_done
            seq, limit = entry[1], issued.limit()
            limit = Limit(math.inf if limit.is_own else limit.seconds - _SLICE_SEC, False)  # torch ends the others
            watch = self.watch(group, seq, limit, issued)
            with self._state.note_wait(group, seq):
                while not done_within(work, _SLICE, collectives.original_wait):
                    watch()
            return True
        except Silenced:
            return False
        except DdpstatsError:
            leave_running(work, group.view.group())
            raise
        except RuntimeError as error:
            verdict = self._verdict_on(error, group, event_of(entry), issued.limit())
            if verdict is None:
                raise
            raise verdict from error

    def _waits_elsewhere(self, group: Group, call: IssuedCall) -> bool:
        """Return whether a rank waits in a collective that was another one here. Say what this one waits in.

        In mode "step", where ranks do not share all memory. Of two ranks that wait in different numbers, the one
        further ahead compares: it has come through the other's number.
        """
        if self._strict or group.exchange is None or group.exchange.is_quick:
            return False
        event, seq, _ = call.entry
        store, own = group.exchange.store, f"{seq} {event.digest}"
        with store.within(GLANCE_SEC):
            waits = store.post("waits", own)
            if waits == own.encode():
                return False
            store.set("waits", own)
        with suppress(ValueError):  # foreign bytes
            number, digest = map(int, waits.split())
            same = event if number == seq else self.agreement.own.report_status(group.name).at(number)
            return same is not None and same.digest != digest
        return False

    def _verdict_on(self, error: RuntimeError, group: Group, event: Event, limit: Limit) -> DdpstatsError | None:
        """Return the verdict on torch's error; None where that is what the program is to see."""
        if not self._strict and _REFUSED.search(str(error)):  # gloo does so before the other ranks have to come
            wait_for(lambda: min(self._read_begun(group).values(), default=event.seq) >= event.seq, _REFUSED_SEC)
            return self.explain(event, group, overdue=False)
        if not is_broken(error):
            return None
        if self.is_own_timeout(error, group, limit):
            late = sorted(self._behind(group, event.seq))
            who = f"{ranks_text(late)} did not come to" if late else "not all ranks came to"
            add_note(error, f"{who} collective number {event.seq} of {group.words}, {event}{event.at}, in time.")
            self.give_up(group)
            return None
        return self.explain(event, group)

    def watch(
        self, group: Group, seq: int, limit: Limit, call: IssuedCall | None, note: int | None = None
    ) -> Callable[[], None]:
        """Return what a rank calls now and then while it waits for ``seq``: it looks for alarms and for lost ranks.

        ``limit``: from now on. ``call``: this rank's, which those that wait compare where nothing has compared it yet.
        ``note``: it waits for the others' notes of that number.
        """
        look_sec, began, looks_at, passed_at = shared_poll(0.0, len(group.view.ranks)), time.time(), 0.0, math.inf
        deadline = time.monotonic() + limit.seconds

        def watch() -> None:
            nonlocal looks_at, passed_at
            now = time.monotonic()
            if now < looks_at:
                return
            looks_at = now + look_sec
            self._state.recording.wait(began)
            try:
                # Whether a rank of this host has begun a collective that comes after the last one of this rank.
                is_passed = self.has_ended and max(self._read_begun(group).values(), default=0) > group.seq
                passed_at = min(passed_at, now) if is_passed else math.inf
                self._look(group, seq, now > deadline, limit.is_own, note)
                if call is not None and self._waits_elsewhere(group, call):
                    self.differ(group, seq)
                    raise Silenced
                limit_sec = group.limit().seconds
                if now > passed_at + (limit_sec if limit_sec <= _SHORT_SEC else _PASSED_SEC):
                    self.await_verdict(alarm_of(group, group.seq + 1, overdue=True))
                    raise Silenced
            except DdpstatsError:
                raise
            except StoreSilent:
                pass  # the collective may still go on; and if not, the deadline comes
            except STORE_ERRORS as error:
                self.conclude_alone(group, seq, error)

        return watch

    def _look(self, group: Group, seq: int, is_late: bool, is_own: bool, note: int | None) -> None:
        self._state.raise_verdict()
        self.catch_up()
        if self._state.silent:
            raise Silenced
        if self.has_given_up(group) or (is_late and is_own):
            raise GivenUp
        cannot_come = self._cannot_come(group, seq, note)
        if self.ends_by is not None and (cannot_come or time.monotonic() > self.ends_by):
            absent = sorted(self._behind(group, seq, note))
            who = ranks_text(absent) if absent else "some rank"
            raise Unfinished(f"{who} had ended without a last comparison, or did not come to it in time")
        if is_late or cannot_come:
            self.await_verdict(alarm_of(group, seq, overdue=True))
            raise Silenced

    # -- which ranks have not come, and which cannot any more ---------------------------------------------------------

    def _cannot_come(self, group: Group, seq: int, note: int | None = None, is_on_host: bool = True) -> set[int]:
        """Return the ranks that died or left before they came to that collective, or posted that note.

        On a device, a rank that has begun the collective may have died when it was done.
        """
        others = set(group.view.ranks) - {group.view.rank}
        with self.agreement.store.within(GLANCE_SEC):
            left = {} if self.agreement.is_lost else self.agreement.read_left()  # deaths are known without the store
            gone, dead = others & left.keys(), self.agreement.dead(others - left.keys())
            behind = self._behind(group, seq, note, is_on_host=False) if gone or (dead and not is_on_host) else set()
        early = {rank for rank in gone if rank in behind or left[rank].counts.get(group.name, 0) < seq}
        return early | (dead if is_on_host else dead & behind)

    def _behind(self, group: Group, seq: int, note: int | None = None, is_on_host: bool = True) -> set[int]:
        """Return the ranks known not to have come to that collective; those that have not posted ``note``, if given.

        In mode "step" those of this host. On a device, where torch ends no wait, a rank of which nothing is known does
        not count: it may share no memory. None where the store is silent, or this rank has not posted the note either.
        """
        assert group.exchange is not None
        note = seq if self._strict else note
        try:
            with self.agreement.store.within(GLANCE_SEC):
                if note is None:
                    is_known = group.exchange.is_quick or (is_on_host and group.exchange.shares_memory())
                    return {rank for rank, last in self._read_begun(group).items() if last < seq and (last or is_known)}
                absent = {group.view.ranks[index] for index in group.exchange.absent(note)}
        except STORE_ERRORS:
            return set()
        return set() if group.view.rank in absent else absent

    def _read_begun(self, group: Group) -> dict[int, int]:
        """Return the last collective that each rank of this host has begun, as the host's memory shows."""
        assert group.exchange is not None
        by_index, peers = group.exchange.read_announced, self.agreement.members.peers
        events = {rank: by_index(index)[-1:] for index, rank in enumerate(group.view.ranks) if rank in peers}
        return {rank: last[0][0] if last else 0 for rank, last in events.items()}

    # -- messages -----------------------------------------------------------------------------------------------------

    def begin_message(self, group: Group, event: Event) -> None:
        """Leave a word for a message that is about to begin; never waits. Raises where the other rank's is another."""
        exchange, peer, number = group.exchange, event.peer, event.seq
        if exchange is None or peer is None or not number:
            return
        rank = group.view.rank
        sender, receiver = (rank, peer) if event.signature.op == "send" else (peer, rank)
        key = stable_hash(f"{sender} {receiver} {event.tag} {number}") or 1
        content = stable_hash(f"{event.signature.sizes} {event.signature.dtypes}")
        if exchange.announce_message(group.view.ranks.index(peer), key, content):
            self.await_verdict(_alarm_of_message(group, event, is_overdue=False))

    def wait_for_message(self, work: Any, group: Group, event: Event) -> None:
        """Wait until a message was sent, or has come."""
        with self._state.note_wait(group, message_place(event), MESSAGES):
            try:
                # Whether it came or not, gloo must not be asked again: a second wait never ends (2.13).
                collectives.original_wait(work, timedelta(seconds=group.limit().seconds))
                return
            except RuntimeError as error:
                if not is_broken(error):
                    raise
                if self.agreement.alarm() is None and self.is_own_timeout(error, group, group.limit()):
                    add_note(error, f"{event} was not completed in time{event.at}.")
                    self.passed_on = error
                    raise
                broken = error
            # Not in the handler: the backend's own timeout would stand first in the traceback.
            self.await_verdict(_alarm_of_message(group, event, is_overdue=True))
        raise broken


def alarm_of(group: Group, seq: int, overdue: bool = False, tentative: bool = False) -> Alarm:
    return Alarm(group.name, group.words, group.view.ranks, seq, overdue, tentative)


def _alarm_of_message(group: Group, event: Event, is_overdue: bool) -> Alarm:
    ranks = {group.view.rank, group.view.rank if event.peer is None else event.peer}
    return Alarm(event.group, group.words, tuple(sorted(ranks)), event.seq, is_overdue, not is_overdue)


def add_note(error: RuntimeError, text: str) -> None:
    """Add a sentence to torch's own error; before Python 3.11, log it."""
    if hasattr(error, "add_note"):
        error.add_note(f"ddpstats: {text}")
    else:
        log.warning("ddpstats: %s", text)


def ends_by_timeout(text: str) -> bool:
    """Return whether a collective that failed while it was issued may have failed for a timeout.

    All of NCCL's fail so after one that broke: then the reason that NCCL gives decides, and without any a rank is lost.
    """
    reason = nccl_reason(text)
    return bool(LOST.search(reason) and ("communicator was aborted" not in text or _TIMED_OUT.search(reason)))


def is_broken(error: BaseException) -> bool:
    """Return whether a backend says so that another rank is gone, or late, in a wait that torch itself does."""
    if not isinstance(error, RuntimeError) or not LOST.search(nccl_reason(str(error))):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith(_WAITS_IN)


def _error_of(finding: GuardFinding, alarm: Alarm) -> DdpstatsError:
    if finding.kind == MISSING:
        return RankMissing(finding.message, missing_ranks=finding.missing, group=alarm.words)
    return CollectiveMismatch(
        finding.message,
        group=alarm.words,
        seq=finding.seq,
        by_rank=finding.by_rank,
        culprit_ranks=finding.culprits,
        missing_ranks=finding.missing,
    )
