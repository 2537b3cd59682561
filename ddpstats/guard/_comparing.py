"""Comparing what ranks post, waiting for it and for what was issued, and coming to a verdict that all ranks come to.

Every wait here has a deadline, and is cut into slices: in between, a rank looks for alarms that others raised, and for
ranks that died or left. Whatever is found goes through `_failure_agreement`, and is the same error on every rank.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats._observe import collectives
from ddpstats._transport.store import STORE_ERRORS, StoreSilent
from ddpstats.errors import CollectiveMismatch, DdpstatsError, RankMissing
from ddpstats.guard._events import Event, roll, same_labels
from ddpstats.guard._exchange import Note, Overrun, agree
from ddpstats.guard._failure_agreement import MESSAGES, Alarm, FailureAgreement
from ddpstats.guard._p2p import Awaited, unmatched
from ddpstats.guard._session import Group, Session
from ddpstats.guard._spoken import words_of
from ddpstats.guard._status import DOUBT, MISMATCH, MISSING, NOTHING, GuardFinding
from ddpstats.guard._summary import Tally
from ddpstats.guard._telling import gave_up, printed_once, signal_deferred

_SLICE_SEC = 0.2
_RECEIVERS_SEC = 1.0  # a receiver that takes from anybody never looks at a note
_MASK = (1 << 64) - 1
_END = Note(0x454E44, 0)  # posted in place of a collective by a rank that leaves
_WAITS_IN = ("ddpstats.", "torch._", "torch.autograd", "torch.distributed", "torch.nn.parallel", "torch.ops")
_BROKEN = re.compile(r"connection (closed|reset)|timed out|broken pipe", re.IGNORECASE)

log = logging.getLogger("ddpstats")


@dataclass
class Standing:
    """How far a guard has come, over all its sessions."""

    verdict: DdpstatsError | None = None
    silent: bool = False  # a mismatch was warned of: nothing is compared any more
    waits: dict[int, tuple[str, int]] = field(default_factory=dict)  # thread -> the (group, number) that it waits in
    collectives: int = 0
    steps: int = 0
    past: Tally = field(default_factory=Tally)  # of sessions that are over

    def waits_in(self, name: str) -> tuple[str, int] | None:
        """Where some thread of this rank waits: in the group of that name, if one does there."""
        waits = list(self.waits.values())
        return next((place for place in waits if place[0] == name), waits[0] if waits else None)

    @contextmanager
    def waiting(self, group: Group, seq: int) -> Iterator[None]:
        thread = threading.get_ident()
        self.waits[thread] = group.name, seq
        try:
            yield
        finally:
            self.waits.pop(thread, None)


class Silenced(Exception):  # no error: a way out
    """A mismatch was warned of, so nothing is waited for any more."""


class Unfinished(Exception):  # no error: a way out
    """The last comparison cannot go to its end; the text says why."""


class Comparing:
    """Compares the collectives of one session. ``strict``: each one; otherwise rolling digests, now and then."""

    def __init__(self, session: Session, standing: Standing, *, strict: bool, warn: bool, timeout_sec: float) -> None:
        self._session, self._standing, self._strict, self._warn = session, standing, strict, warn
        self._timeout_sec = timeout_sec
        self._ends_by: float | None = None  # the program has ended: until when others are waited for

    @property
    def _agreement(self) -> FailureAgreement:
        assert self._session.agreement is not None
        return self._session.agreement

    # -- before anything moves ----------------------------------------------------------------------------------------

    def foretell(self, group: Group, event: Event) -> None:
        """Say what is about to be issued, where the other ranks of this host see it even if gloo aborts this process.

        Raises where a neighbour in the group has said something else; never waits.
        """
        assert group.exchange is not None
        if group.exchange.tell(event.seq, event.digest, words_of(event)):
            self._await_verdict(alarm_of(group, event.seq, doubt=True))

    # -- strict: one by one -------------------------------------------------------------------------------------------

    def post(self, group: Group, event: Event) -> None:
        assert group.exchange is not None
        group.rolling = roll(group.rolling, event.digest)
        with self._answered(alarm_of(group, event.seq, until=True)):
            group.exchange.post(event.seq, Note(event.digest, event.balance, event.word, group.rolling))

    def settle(self, group: Group, until: int) -> None:
        """See that all ranks posted the same, up to number ``until``. Waits for them."""
        deadline = time.monotonic() + self._timeout_sec
        with group.lock:
            while group.settled < until and not self._standing.silent:
                if not self._settle_one(group, group.settled + 1, deadline):
                    return

    def _settle_one(self, group: Group, seq: int, deadline: float) -> bool:
        """False where a warning has ended all comparing."""
        assert group.exchange is not None
        try:
            notes = group.exchange.look(seq)
            if notes is None:
                with self._standing.waiting(group, seq):
                    notes = group.exchange.wait(seq, self._watch(group, seq, deadline))
        except Overrun:  # a later note proves this one
            group.settled = seq
            return True
        except Silenced:
            return False
        except STORE_ERRORS as error:
            return self._conclude_alone(alarm_of(group, seq, until=True), error)
        group.settled = seq
        same = agree(notes)
        if same and same_labels(note.label for note in notes):
            group.agreed = seq
        else:
            self._await_verdict(alarm_of(group, seq, doubt=same))  # labels may differ for good reasons
        return True

    def settle_what_is_ready(self) -> None:
        """Compare what all ranks have posted by now; never waits."""
        for group in list(self._session.named.values()):
            if group.exchange is not None and group.exchange.is_quick and group.lock.acquire(blocking=False):
                try:
                    while group.settled < group.seq and self._is_there(group, group.settled + 1):
                        self._settle_one(group, group.settled + 1, time.monotonic())
                finally:
                    group.lock.release()

    def _is_there(self, group: Group, number: int) -> bool:
        assert group.exchange is not None
        try:
            with self._agreement.glancing():
                return group.exchange.look(number) is not None
        except Overrun:
            return True
        except StoreSilent:
            return False
        except STORE_ERRORS as error:
            return self._conclude_alone(alarm_of(group, group.seq, until=True), error)

    # -- step: rolling digests ----------------------------------------------------------------------------------------

    def take_in(self, group: Group, event: Event, check_every: int) -> None:
        assert group.exchange is not None
        group.rolling = roll(group.rolling, event.digest)
        group.labels = roll(group.labels, event.word)
        group.balance += event.balance
        if group.checks_settled < group.checks and (group.exchange.is_quick or group.seq % 8 == 0):
            self._glance(group)
        if group.seq % check_every == 0:
            self.post_check(group)  # settled when all have posted it, and at `step` at the latest

    def post_check(self, group: Group) -> None:
        assert group.exchange is not None
        group.checks += 1
        group.checked_at[group.checks] = group.seq
        note = Note(roll(group.rolling, group.seq), group.balance & _MASK, group.labels)
        group.labels = 0  # each comparison has the labels since the one before: those that may differ do so once
        with self._answered(alarm_of(group, group.seq, until=True, ending=self._ends_by is not None)):
            group.exchange.post(group.checks, note)

    def settle_checks(self, group: Group) -> None:
        """See that all ranks posted the same rolling digests. Waits for them."""
        with group.lock:
            while group.checks_settled < group.checks and not self._standing.silent:
                if not self._settle_check(group, group.checks_settled + 1):
                    return

    def _settle_check(self, group: Group, number: int) -> bool:
        assert group.exchange is not None
        deadline = time.monotonic() + self._timeout_sec
        try:
            with self._standing.waiting(group, group.seq):
                notes = group.exchange.wait(number, self._watch(group, group.seq, deadline))
        except Overrun:  # a later one proves this one
            group.checks_settled = number
            return True
        except Silenced:
            return False
        except STORE_ERRORS as error:
            return self._conclude_alone(alarm_of(group, group.seq, until=True), error)
        group.checks_settled = number
        if not agree(notes):
            self._await_verdict(alarm_of(group, group.seq))
        elif any(note.label != notes[0].label for note in notes):
            self._await_verdict(alarm_of(group, group.seq, doubt=True))  # legal, where one rank has no names
        group.agreed = max(group.agreed, group.checked_at.get(number, 0))
        for old in [old for old in group.checked_at if old <= number]:
            del group.checked_at[old]
        return True

    def _glance(self, group: Group) -> None:
        """Settle the oldest comparison if all ranks have posted it by now; never waits."""
        if group.lock.acquire(blocking=False):
            try:
                if self._is_there(group, group.checks_settled + 1):
                    self._settle_check(group, group.checks_settled + 1)
            finally:
                group.lock.release()

    # -- at a step and at the end -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compare all groups as far as they are."""
        groups = self._session.groups()
        if self._strict:
            for group in groups:
                self.settle(group, group.seq)
            return
        for group in groups:
            self.post_check(group)
        for group in groups:
            self.settle_checks(group)

    def post_ends(self) -> None:
        """Say that nothing more will come; never waits."""
        for group in self._session.groups():
            assert group.exchange is not None
            if self._strict:
                with self._answered(alarm_of(group, group.seq + 1, until=True, ending=self._ends_by is not None)):
                    group.exchange.post(group.seq + 1, _END._replace(rolling=group.rolling))
                group.has_ended = True
            else:
                self.post_check(group)

    def finish(self) -> None:
        """The last comparison, after `post_ends`. A rank that left earlier, or runs one collective more, shows here."""
        for group in self._session.groups():
            if self._strict:
                self.settle(group, group.seq + 1)
            else:
                self.settle_checks(group)
        self._await_receivers()

    @contextmanager
    def ending_within(self, seconds: float) -> Iterator[None]:
        """Around `post_ends` and `finish`: the program has come to its end, and ranks may do so at different times.

        Raises `Unfinished` where some rank does not come in time, has died, or has left before.
        """
        self._ends_by = time.monotonic() + seconds
        try:
            yield
        finally:
            self._ends_by = None

    def _late(self, group: Group) -> Unfinished:
        assert group.exchange is not None
        number = group.settled + 1 if self._strict else group.checks_settled + 1
        late = [group.view.ranks[index] for index in group.exchange.absent(number)]
        who = ranks_text(late) if late else "some rank"
        return Unfinished(f"{who} had not come to the end of the program in time")

    def _await_receivers(self) -> None:
        """Let who receives this rank's last messages find them wrong while this rank can still be told."""
        senders = [group.messages for group in self._session.named.values() if group.messages is not None]
        deadline = time.monotonic() + _RECEIVERS_SEC
        while time.monotonic() < deadline and any(messages.unread() for messages in senders):
            self._poll_alarm()
            time.sleep(0.005)
        for group in self._session.named.values():
            group.unread = 0 if group.messages is None else group.messages.unread()
        if senders:
            self._poll_alarm()

    # -- waiting for what was issued ----------------------------------------------------------------------------------

    def wait_for(self, work: Any, group: Group, event: Event) -> None:
        """Wait for a collective that was issued, looking up between slices."""
        try:
            if collectives.wait_within(work, _SLICE_SEC):
                return
            deadline = time.monotonic() + self._timeout_sec - _SLICE_SEC
            watch = self._watch(group, event.seq, deadline, waited_for=event)
            with self._standing.waiting(group, event.seq):
                while not collectives.wait_within(work, _SLICE_SEC):
                    watch()
        except Silenced:
            return  # the caller waits on, as without a guard
        except DdpstatsError:
            gave_up(work, group.view.group())
            raise
        except RuntimeError as error:
            found = self.explain(event, group) if is_broken(error) else None
            if found is None:
                raise
            raise found from error

    def _watch(self, group: Group, seq: int, deadline: float, waited_for: Event | None = None) -> Callable[[], None]:
        """What a rank does now and then while it waits for ``seq``: look for alarms, and for ranks that cannot come.

        ``waited_for``: what it waits for was issued without being compared, so the waiting ranks compare it now.
        """

        def watch() -> None:
            try:
                look()
            except StoreSilent:
                pass  # the collective may still go on; and if not, the deadline comes
            except STORE_ERRORS as error:
                self._conclude_alone(alarm_of(group, seq, until=True), error)

        def look() -> None:
            self._poll_alarm()
            if self._ends_by is not None and time.monotonic() > self._ends_by:
                raise self._late(group)
            if time.monotonic() > deadline or self._cannot_come(group, seq):
                self._await_verdict(alarm_of(group, seq, until=True, ending=self._ends_by is not None))
                raise Silenced
            if waited_for is not None and self._waits_elsewhere(waited_for, group):
                self._await_verdict(alarm_of(group, seq))
                raise Silenced

        return watch

    def _poll_alarm(self) -> None:
        """Take part in an alarm that is on."""
        alarm = self._agreement.alarm()
        if alarm is not None:
            self._await_verdict(alarm)
            if self._standing.silent:
                raise Silenced

    def _cannot_come(self, group: Group, seq: int) -> bool:
        """Whether a rank that this one waits for has died, or left before this collective."""
        agreement = self._agreement
        others = [rank for rank in group.view.ranks if rank != group.view.rank]
        gone = {}
        with agreement.glancing():
            if agreement.someone_left():
                gone = {rank: left for rank in others if (left := agreement.has_left(rank)) is not None}
            if any(left.get("counts", {}).get(group.name, 0) < seq for left in gone.values()):
                return True
            return bool(agreement.dead([rank for rank in others if rank not in gone]))

    def _waits_elsewhere(self, event: Event, group: Group) -> bool:
        with self._agreement.glancing():
            return self._agreement.another_waits_elsewhere(event, group.view.ranks)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post_message(self, group: Group, event: Event) -> None:
        """Say what is about to be sent; never waits."""
        assert group.messages is not None
        with self._answered(self._alarm_of_message(group, event)):
            group.messages.sent(event)

    def settle_message(self, group: Group, awaited: Awaited) -> None:
        """Compare a message with what its receiver expects, before it is taken."""
        assert group.messages is not None
        messages = group.messages
        deadline = time.monotonic() + self._timeout_sec
        other = self._alarm_of_message(group, awaited.event)

        def watch() -> None:
            self._poll_alarm()
            if time.monotonic() > deadline or self._is_dead(awaited.source):
                self._publish_verdict(self._unmatched(awaited.event, group), other)
                raise Silenced

        try:
            found = messages.compare(awaited, watch)
        except Silenced:
            return
        except STORE_ERRORS as error:
            self._conclude_alone(other, error)
            return
        if found is None:
            group.received_well += 1
        else:
            self._publish_verdict(found, other)

    def wait_for_message(self, work: Any, group: Group, event: Event) -> None:
        try:
            collectives.wait_once(work, self._timeout_sec)
            return
        except RuntimeError as error:
            if not is_broken(error):
                raise
            broken = error
        # Not in the handler: what the backend says of it, a timeout of its own, would stand first in the traceback.
        alarm = self._alarm_of_message(group, event)
        with self._answered(alarm):
            self._publish_verdict(self._unmatched(event, group), alarm)
        raise broken

    @staticmethod
    def _alarm_of_message(group: Group, event: Event) -> Alarm:
        peers = () if event.peer is None else (event.peer,)
        return Alarm(event.group, group.words, (*peers, group.view.rank), event.seq, True)

    def _is_dead(self, rank: int) -> bool:
        try:
            with self._agreement.glancing():
                return bool(self._agreement.dead([rank]))
        except StoreSilent:
            return False

    def _unmatched(self, event: Event, group: Group) -> GuardFinding:
        messages = group.messages
        with self._agreement.asking():
            last = None if messages is None or event.peer is None else messages.last_from(event.peer)
            peer = None if event.peer is None else self._agreement.last_known(event.peer, group.name)
        return unmatched(event, group.view.rank, group.words, last, peer)

    # -- concluding ---------------------------------------------------------------------------------------------------

    def explain(self, last: Event | None, group: Group | None = None) -> DdpstatsError | None:
        """A wait failed: who is missing, and why? None where nothing can be said. ``last``: this rank's last event."""
        group = group or (self._session.named.get(last.group.removesuffix(MESSAGES)) if last is not None else None)
        if group is None:
            return None
        alarm = self._agreement.alarm() or alarm_of(group, group.seq, until=True, doubt=True)
        try:
            with signal_deferred():
                self._raise_or_warn(self._agreement.raise_alarm(alarm), alarm)
        except DdpstatsError as found:
            return found
        return None

    def _await_verdict(self, alarm: Alarm) -> None:
        """Come to the verdict that all ranks come to; raise or log it."""
        with signal_deferred():
            self._raise_or_warn(self._agreement.raise_alarm(alarm), alarm)

    @contextmanager
    def _answered(self, alarm: Alarm) -> Iterator[None]:
        """Around what the store must answer at once."""
        try:
            yield
        except DdpstatsError:
            raise
        except STORE_ERRORS as error:
            self._conclude_alone(alarm, error)

    def _conclude_alone(self, alarm: Alarm, error: BaseException) -> bool:
        """The store does not answer; always raises."""
        self._raise_or_warn(self._agreement.without_store(alarm, error), alarm)
        return False

    def _publish_verdict(self, finding: GuardFinding, alarm: Alarm) -> None:
        """A verdict that this rank can give alone."""
        self._raise_or_warn(self._agreement.declare(finding, alarm), alarm)

    def _raise_or_warn(self, finding: GuardFinding, alarm: Alarm) -> None:
        if finding.kind in (NOTHING, DOUBT):
            return
        error = _error_of(finding, alarm)
        self._session.note(finding.group, finding.seq, finding.kind == MISMATCH)
        if self._warn and isinstance(error, CollectiveMismatch):
            self._standing.silent = True
            log.warning("%s", error)
            return
        if alarm.ending and self._ends_by is not None and finding.kind == MISSING:
            raise Unfinished(
                f"{ranks_text(finding.missing)} had ended without a last comparison (killed, or in an error)"
            )
        self._standing.verdict = error
        printed_once(error, self._agreement, alarm.ranks)
        raise error


def is_broken(error: BaseException) -> bool:
    """Whether this is how a backend says that another rank is gone, or late, in a wait that torch itself does."""
    if not isinstance(error, RuntimeError) or not _BROKEN.search(str(error)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(_WAITS_IN)


def alarm_of(group: Group, seq: int, until: bool = False, doubt: bool = False, ending: bool = False) -> Alarm:
    return Alarm(group.name, group.words, group.view.ranks, seq, until, doubt, ending)


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
