"""How one rank waits for the others, and comes to the verdict that all come to: to raise it, to log it, or to go on.

Every wait has a deadline, and is cut into slices: in between, a rank looks for alarms that others raised, and for ranks
that died or left. Whatever is found goes through `failure_agreement`, and is the same error on every rank.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from ddpstats._base.text import ranks_text
from ddpstats._observe import collectives
from ddpstats._observe.groups import longest_timeout_sec
from ddpstats._observe.operators import Collective
from ddpstats._ranks.store import STORE_ERRORS, StoreSilent, shared_poll
from ddpstats.errors import CollectiveMismatch, DdpstatsError, RankMissing
from ddpstats.guard.event import MESSAGES, Entry, Event, event_of
from ddpstats.guard.failure_agreement import Alarm, FailureAgreement, wait_until
from ddpstats.guard.group import FindLimit, Group, Limit, Session, Settings, Standing
from ddpstats.guard.printing import leave_running, print_once, sigterm_deferred
from ddpstats.guard.status import DOUBT, MISMATCH, MISSING, NOTHING, GuardFinding

_SLICE_SEC = 0.2
_POLL_SEC = 0.02
_SLICE = timedelta(seconds=_SLICE_SEC)
_WAITS_IN = ("ddpstats.", "torch._", "torch.autograd", "torch.distributed", "torch.nn.parallel", "torch.ops")
_BROKEN = re.compile(
    r"connection (closed|reset)|timed out|broken pipe|monitoredBarrier"
    r"|Watchdog caught collective operation timeout|ncclRemoteError|ncclSystemError|NCCL operations have failed",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"\[enforce fail at ")
_TIMED_OUT = re.compile(r"timed out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
_REFUSED_SEC = 2.0  # for the other ranks to begin a collective whose arguments gloo has refused here
_NOTICE_SEC = 0.5  # for a rank whose own timeout has passed to say so, once it has closed its connections
_PASSED_SEC = 5.0  # for a collective that this rank has ended without: its caller may have given it a timeout
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

    def __init__(self, session: Session, standing: Standing, settings: Settings) -> None:
        self._session, self._standing = session, standing
        self._warn, self._strict, self.timeout_sec = settings.warn, settings.mode == "strict", settings.timeout_sec
        self.ends_by: float | None = None  # the program has ended: until when others are waited for
        self.has_ended = False  # this rank has posted its ends: it issues nothing more that is compared
        self.passed_on: BaseException | None = None  # torch's own error of a message, which the program gets

    @property
    def agreement(self) -> FailureAgreement:
        assert self._session.agreement is not None
        return self._session.agreement

    def poll_alarm(self) -> None:
        """Take part in an alarm that is on. Raises `Silenced` where its verdict ends all comparing."""
        alarm = self.agreement.alarm()
        if alarm is not None:
            self.await_verdict(alarm)
            if self._standing.silent:
                raise Silenced

    def take_in(self) -> None:
        """Come to the verdict that the watchdog has read; never waits. Raises or logs it."""
        alarm = self.agreement.pending_alarm()
        if alarm is not None:
            self.await_verdict(alarm)

    def catch_up(self) -> None:
        """Come to the verdicts of all alarms that are on: of groups, too, which this rank is no member of."""
        try:
            while self.agreement.alarm() is not None:
                self.poll_alarm()
        except Silenced:
            pass

    def await_verdict(self, alarm: Alarm) -> None:
        """Come to the verdict that all ranks come to; raise or log it."""
        has_time = not alarm.overdue and self.ends_by is None  # a difference was seen, and nobody has waited for it
        with sigterm_deferred():
            finding = self.agreement.raise_alarm(alarm, self.timeout_sec if has_time else 0.0)
            self._raise_or_warn(finding, alarm)

    def differ(self, group: Group, seq: int, tentative: bool = False) -> None:
        """Ranks differ, or their labels do: come to the verdict on it. Raises `GivenUp` where that is no wonder."""
        if self.has_given_up(group):
            raise GivenUp
        self.await_verdict(alarm_of(group, seq, tentative=tentative))

    def conclude_alone(self, alarm: Alarm, error: BaseException) -> NoReturn:
        """The store does not answer."""
        try:
            self._raise_or_warn(self.agreement.without_store(alarm, error), alarm)
        except DdpstatsError as found:
            found.__context__ = error.__context__  # which may be the program's: how the store was asked helps nobody
            raise
        raise AssertionError("a missing rank is always raised")

    # -- a timeout of the program's own -------------------------------------------------------------------------------

    def give_up(self, group: Group) -> None:
        """Compare no collective of the group any more, here and on its other ranks; never waits for long."""
        group.is_given_up = True
        self.agreement.store.post_later(_given_up_key(group), str(self.agreement.rank))

    def has_given_up(self, group: Group) -> bool:
        """Return whether torch's own timeout has ended a collective of the group on some rank."""
        if not group.is_given_up:
            with suppress(*STORE_ERRORS), self.agreement.glancing():
                group.is_given_up = self.agreement.store.check([_given_up_key(group)])
        return group.is_given_up

    def note_failure(self, call: Collective, error: RuntimeError) -> None:
        """Note that a collective has failed while it was issued: torch's own barrier with a timeout does so."""
        group = self._session.find(call.view)
        if group is None:
            return
        if _TIMED_OUT.search(str(error)) or _BROKEN.search(str(error)):
            self.give_up(group)

    def is_own_timeout(self, error: RuntimeError, group: Group, limit: Limit) -> bool:
        """Return whether the program's own timeout has passed, here or on a rank that closed its connections then."""
        if not limit.is_own or group.is_given_up:
            return group.is_given_up
        if _TIMED_OUT.search(str(error)):
            return True
        others = [rank for rank in group.view.ranks if rank != group.view.rank]
        deadline = time.monotonic() + _NOTICE_SEC
        while time.monotonic() < deadline and not self.agreement.roster.dead(others):
            if self.has_given_up(group):
                return True
            time.sleep(_POLL_SEC)
        return False

    def _is_refused_mismatch(self, error: RuntimeError, group: Group, event: Event) -> bool:
        """Return whether gloo has refused this rank's arguments, and the calls of this host's ranks are seen to differ.

        It refuses them before the others have to come, so these get a moment to do so.
        """
        if not _REFUSED.search(str(error)):
            return False
        with suppress(*STORE_ERRORS):
            wait_until(lambda: self._have_begun(group, event.seq), _REFUSED_SEC)
            return self.agreement.compare_memory(alarm_of(group, event.seq)) is not None
        return False

    def _name_absent(self, error: RuntimeError, group: Group, event: Event) -> None:
        """Add to torch's error which ranks have not come."""
        late = self._behind(group, event.seq)
        who = f"{ranks_text(late)} did not come to" if late else "not all ranks came to"
        add_note(error, f"{who} collective number {event.seq} of {group.words}, {event}{event.at}, in time.")

    def _behind(self, group: Group, seq: int) -> tuple[int, ...]:
        """Return the ranks known not to have come to that collective: in mode "step" those of this host."""
        assert group.exchange is not None
        if self._strict:
            return self._absent(group)
        here, announced = self.agreement.roster.peers, group.exchange.announced
        last = {rank: announced(index)[-1:] for index, rank in enumerate(group.view.ranks) if rank in here}
        return tuple(rank for rank, events in last.items() if not events or events[0][0] < seq)

    def _have_begun(self, group: Group, seq: int) -> bool:
        """Return whether the memory of this host shows that all ranks have begun that collective."""
        assert group.exchange is not None
        events_of_ranks = map(group.exchange.announced, range(len(group.view.ranks)))
        return all(events and events[-1][0] >= seq for events in events_of_ranks)

    # -- waiting, with a deadline and in slices -----------------------------------------------------------------------

    def wait_for(self, work: Any, group: Group, entry: Entry, find_limit: FindLimit | None = None) -> None:
        """Wait for a collective that was issued, looking up between slices; for no longer than the call would."""
        find_limit = find_limit or group.limit
        try:
            if collectives.wait_within(work, _SLICE) or group.is_given_up:
                return
            event, limit = event_of(entry), find_limit()
            deadline = time.monotonic() + limit.seconds - _SLICE_SEC
            watch = self.watch(group, event.seq, math.inf if limit.is_own else deadline, waited_for=event)
            with self._standing.waiting(group, event.seq):
                while not collectives.wait_within(work, _SLICE):
                    watch()
        except Silenced:
            return  # the caller waits on, as without a guard
        except DdpstatsError:
            leave_running(work, group.view.group())
            raise
        except RuntimeError as error:
            if not is_broken(error) and not self._is_refused_mismatch(error, group, event_of(entry)):
                raise
            if self.is_own_timeout(error, group, find_limit()):
                self._name_absent(error, group, event_of(entry))
                self.give_up(group)
                raise
            found = self.explain(event_of(entry), group)
            if found is None:
                raise
            raise found from error

    def watch(
        self,
        group: Group,
        seq: int,
        deadline: float,
        waited_for: Event | None = None,
        is_own: bool = False,
    ) -> Callable[[], None]:
        """What a rank does now and then while it waits for ``seq``: look for alarms, and for ranks that cannot come.

        ``waited_for``: what it waits for was issued without being compared, so the waiting ranks compare it now.
        ``is_own``: the deadline is the program's own, and torch raises the error.
        """

        passed_at: float | None = None
        looks_at, look_sec, began = 0.0, shared_poll(0.0, len(group.view.ranks)), time.time()

        def watch() -> None:
            nonlocal looks_at
            if time.monotonic() < looks_at:
                return
            looks_at = time.monotonic() + look_sec
            self._standing.recording.wait(began)
            try:
                look()
            except DdpstatsError:
                raise
            except StoreSilent:
                pass  # the collective may still go on; and if not, the deadline comes
            except STORE_ERRORS as error:
                self.conclude_alone(alarm_of(group, seq, overdue=True), error)

        def look() -> None:
            nonlocal passed_at
            self.poll_alarm()
            ends_by = self.ends_by
            if ends_by is not None and time.monotonic() > ends_by:
                raise self._late(group)
            is_late = time.monotonic() > deadline
            if self.has_given_up(group) or (is_late and is_own):
                raise GivenUp
            if is_late or self._cannot_come(group, seq):
                self.await_verdict(alarm_of(group, seq, overdue=True, ending=ends_by is not None))
                raise Silenced
            if waited_for is not None and self._waits_elsewhere(waited_for):
                self.differ(group, seq)
                raise Silenced
            if self.has_ended and self._is_passed(group):
                passed_at = passed_at or time.monotonic()
                if time.monotonic() > passed_at + _may_fail_sec(group):
                    self.await_verdict(alarm_of(group, group.seq + 1, overdue=True))
                    raise Silenced

        return watch

    def _is_passed(self, group: Group) -> bool:
        """Return whether a rank of this host has begun a collective that comes after the last one of this rank."""
        assert group.exchange is not None
        told = map(group.exchange.announced, range(len(group.view.ranks)))
        return any(events[-1][0] > group.seq for events in told if events)

    def _cannot_come(self, group: Group, seq: int) -> bool:
        """Return whether a rank that this one waits for has died, or left before this collective."""
        agreement = self.agreement
        others = [rank for rank in group.view.ranks if rank != group.view.rank]
        with agreement.glancing():
            left_so_far = {} if agreement.is_lost else agreement.left()  # who died is known without the store
            gone = {rank: left for rank, left in left_so_far.items() if rank in others}
            if any(left.get("counts", {}).get(group.name, 0) < seq for left in gone.values()):
                return True
            if gone and not gone.keys().isdisjoint(self._absent(group)):  # it left in the middle of a call, by an error
                return True
            return bool(agreement.dead([rank for rank in others if rank not in gone]))

    def _absent(self, group: Group) -> tuple[int, ...]:
        """Whose next note this rank waits for; nobody's, where its own is to be posted yet, or the store is silent."""
        assert group.exchange is not None
        try:
            with self.agreement.glancing():
                absent = tuple(group.view.ranks[index] for index in group.exchange.absent(group.settled + 1))
        except STORE_ERRORS:
            return ()
        return () if group.view.rank in absent else absent

    def _late(self, group: Group) -> Unfinished:
        late = self._absent(group)
        who = ranks_text(late) if late else "some rank"
        return Unfinished(f"{who} had not come to the end of the program in time")

    def _waits_elsewhere(self, event: Event) -> bool:
        with self.agreement.glancing():
            return self.agreement.another_waits_elsewhere(event)

    # -- coming to a verdict ------------------------------------------------------------------------------------------

    def explain(self, last: Event | None, group: Group | None = None) -> DdpstatsError | None:
        """A wait failed: who is missing, and why? None where nothing can be said. ``last``: this rank's last event."""
        group = group or (self._session.named.get(last.group.removesuffix(MESSAGES)) if last is not None else None)
        if group is None:
            return None
        alarm = self.agreement.alarm() or alarm_of(group, group.seq, overdue=True, tentative=True)
        try:
            # It waited until now. A rank that did not wait there is the missing one.
            with self._standing.waiting(group, group.seq):
                self.await_verdict(alarm)
        except DdpstatsError as found:
            return found
        return None

    def _raise_or_warn(self, finding: GuardFinding, alarm: Alarm) -> None:
        if finding.kind in (NOTHING, DOUBT):
            return
        error = _error_of(finding, alarm)
        self._session.note(finding.group, finding.seq, finding.kind == MISMATCH)
        self._standing.recording.alarm("guard", finding.message)
        if self._warn and isinstance(error, CollectiveMismatch):
            self._standing.silent = True
            log.warning("%s", error)
            return
        if alarm.ending and self.ends_by is not None and finding.kind == MISSING:
            raise Unfinished(
                f"{ranks_text(finding.missing)} had ended without a last comparison (killed, or in an error)"
            )
        self._standing.verdict = error
        rank, roster = self.agreement.rank, self.agreement.roster
        printer = rank if finding.printer is None else finding.printer
        print_once(error, rank, printer, lambda: bool(roster.dead([printer])))
        raise error


def _may_fail_sec(group: Group) -> float:
    """For how long a program may wait in a collective that some rank never makes, because it means that to fail."""
    own_sec = longest_timeout_sec(group.view.group())
    return max(own_sec, _PASSED_SEC) if own_sec <= _SHORT_SEC else _PASSED_SEC


def _given_up_key(group: Group) -> str:
    return f"given up/{group.name}"


def alarm_of(group: Group, seq: int, overdue: bool = False, tentative: bool = False, ending: bool = False) -> Alarm:
    return Alarm(group.name, group.words, group.view.ranks, seq, overdue, tentative, ending)


def add_note(error: RuntimeError, text: str) -> None:
    """Add a sentence to torch's own error; before Python 3.11, log it."""
    if hasattr(error, "add_note"):
        error.add_note(f"ddpstats: {text}")
    else:
        log.warning("ddpstats: %s", text)


def is_broken(error: BaseException) -> bool:
    """Return whether a backend says so that another rank is gone, or late, in a wait that torch itself does."""
    if not isinstance(error, RuntimeError) or not _BROKEN.search(str(error)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(_WAITS_IN)


def _error_of(finding: GuardFinding, alarm: Alarm) -> DdpstatsError:
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
