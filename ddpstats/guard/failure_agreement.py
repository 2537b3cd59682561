"""When something is wrong: one alarm, the status of every rank, one verdict. All through the store.

Ranks come to the verdict as in every failure (`ddpstats._ranks.failure.FailureRound`). What is the guard's own:

1. An alarm names a group, and the number of a collective in which ranks differ or one has waited too long.
2. Every rank that is alive reports its status: what it ran on that group, what it waits in, where its main thread is.
   The main thread of a rank that waits does so; the rank's watchdog does where the main thread is busy elsewhere.
3. The judge waits for the statuses of all ranks until its patience is over. `diagnosis` says what is wrong, and the
   verdict names the rank that prints it.
4. The watchdog reads the verdict, too, so that the main thread raises it also where the store is gone by then.

The store is read by every rank and trusted by none: bytes that are no status count as none. It is one thread that
answers all ranks, so a rank asks of no other one by one while it waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ddpstats._ranks.failure import FailureRound, Membership
from ddpstats._ranks.store import GLANCE_SEC, STORE_ERRORS, StoreLog, StoreSilent, growing_polls, shared_poll, wait_for
from ddpstats.guard import diagnosis
from ddpstats.guard.diagnosis import MISMATCH, MISSING, Alarm, Departure, GuardFinding, RankStatus
from ddpstats.guard.event import MESSAGES, Event

WATCHDOG_SEC = 0.25
_ASLEEP_SEC = 3.0  # a look of the watchdog takes less where threads of Python run, also on a busy machine
_LATELY_SEC = 5.0  # from the end of a sleep: for as long as others may be about to judge
_LOOK_ANSWERS_SEC = 2.0  # of all answers of the store in one look
_PATIENCE_SEC = 4.0
_JUDGING_SEC = 2.0  # from then on another rank judges
_LONGEST_POLL_SEC = 0.1
_ASKING_SEC = 3.0
_LINGER_SEC = 3.0  # for all ranks to have a verdict: a watchdog prints it after a second
_LAST_LINGER_SEC = 10.0  # all ranks have come to their end, and are about to report that
_MAX_POSITION_BYTES = 2000


class OwnRank(Protocol):
    """An agreement asks the guard of this process through it, and delivers verdicts. Called from any thread."""

    def report_status(self, name: str) -> RankStatus:
        """Return what this rank knows of itself about one group."""

    def position(self) -> str:
        """Return the rank's last collective in words."""

    def take_verdict(self, finding: GuardFinding) -> None:
        """Take each verdict, before it is raised."""


AnnouncedBy = Callable[[str, int], list[Event]]


class FailureAgreement:
    """This rank's side.

    ``members``: which processes of all ranks live. The watchdog keeps the ``position`` of the ``own`` rank in the store
    for the case that the process dies; ``announced_by`` returns the last collectives of a rank of this host in a group,
    as that wrote them into shared memory before it issued them. When the store is no longer ``is_reachable``, the
    watchdog ends.
    """

    def __init__(
        self, members: Membership, own: OwnRank, announced_by: AnnouncedBy, is_reachable: Callable[[], bool]
    ) -> None:
        self.members, self.rank, self.store = members, members.rank, members.store
        self.verdicts = 0  # so far
        self._lock = threading.Lock()  # of that number
        self.failure = self._next()  # the one after these verdicts
        self._concluded: FailureRound | None = None  # the one before it
        self.own, self._read_announced, self._is_reachable = own, announced_by, is_reachable
        self.is_lost = False  # the store does not answer any more
        self._left: dict[int, Departure] = {}
        self._leaving = StoreLog(self.store, "left")
        self.on_look: Callable[[], None] = lambda: None  # called by the watchdog, after each of its looks
        self.look_sec = shared_poll(WATCHDOG_SEC, len(members.ranks))  # how often a watchdog looks
        self._kept_position = ""
        self._slept_sec, self._woke, self._awake = 0.0, -math.inf, math.inf  # when the watchdog last ran
        members.join()
        self._is_closed = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="ddpstats-guard", daemon=True)
        self._watchdog.start()

    # -- alarms -------------------------------------------------------------------------------------------------------

    def alarm(self) -> Alarm | None:
        """Return the alarm that is on, if there is one."""
        try:
            with self.store.within(GLANCE_SEC):
                was_known, alarm = self.failure.alarm is not None, self.failure.find_alarm()
            self.is_lost = self.is_lost and was_known  # then the store was not asked
            return None if alarm is None else Alarm.unpack(alarm)
        except STORE_ERRORS as error:
            self.is_lost = not isinstance(error, ValueError)  # that is for foreign bytes
            return None

    def raise_alarm(self, alarm: Alarm, at_least_sec: float = 0.0) -> GuardFinding:
        """Raise the alarm, unless one is on already; return the verdict on the one that is on.

        ``at_least_sec``: how long the store may be silent, where that is longer than usual.
        """
        try:
            while True:
                failure = self.failure
                with self.store.within(max(at_least_sec, GLANCE_SEC if self.is_lost else _ASKING_SEC)):
                    current = Alarm.unpack(failure.raise_alarm(alarm.pack()))
                finding = self._conclude(failure, current)
                if finding.is_error or current == alarm:
                    return finding
        except STORE_ERRORS as error:
            return self.without_store(alarm, error)

    def without_store(self, alarm: Alarm, error: BaseException) -> GuardFinding:
        """Return the verdict that the watchdog has read; otherwise what this rank can conclude alone."""
        self.is_lost = True
        failure = self.failure
        if failure.alarm is not None and failure.verdict is not None:
            return self._conclude(failure, Alarm.unpack(failure.alarm))
        mismatch = self._compare_memory(alarm)
        if mismatch is not None:
            return mismatch
        loss = self.members.diagnose_without_store(error, alarm.ranks)
        status = self.own.report_status(alarm.group)
        event = status.message_waited_for() if alarm.group.endswith(MESSAGES) else status.at(alarm.seq)
        own_call = [] if event is None else diagnosis.call_lines([self.rank], event)
        head = f"{diagnosis.name_of(alarm.group, alarm.seq)} of {alarm.words} was not completed:"
        return GuardFinding(MISSING, loss.message([head, *own_call]), alarm.group, alarm.seq, loss.missing)

    def _compare_memory(self, alarm: Alarm) -> GuardFinding | None:
        """Return a mismatch that shows in this host's memory: gloo ends a process that gets more than it expects."""
        statuses = [self.own.report_status(alarm.group)]
        for rank in set(alarm.ranks) - {self.rank}:
            events = self._read_announced(alarm.group, rank)
            if not events:
                return None
            statuses.append(_status_from_memory(rank, events))
        statuses.sort(key=lambda status: status.rank)
        finding = diagnosis.find(replace(alarm, overdue=False, tentative=False), statuses)
        return finding if finding is not None and finding.kind == MISMATCH else None

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def _next(self) -> FailureRound:
        return FailureRound(self.store.part(f"failure/{self.verdicts}"), self.rank)

    def _conclude(self, failure: FailureRound, alarm: Alarm) -> GuardFinding:
        """Report this rank's status, and wait for the verdict. Several threads may do so at once."""
        try:
            finding = GuardFinding.unpack(failure.verdict or self._settle(failure, alarm))
        except ValueError:  # foreign bytes
            finding = diagnosis.find_unexplained(alarm.group, alarm.words, alarm.seq, alarm.overdue)
        with self._lock:
            if self.failure is failure:
                self.own.take_verdict(finding)
                self.verdicts += 1
                self.failure, self._concluded = self._next(), failure
        return finding

    def _settle(self, failure: FailureRound, alarm: Alarm) -> bytes:
        """Return the verdict, by whichever rank."""
        failure.report(self.own.report_status(alarm.group).pack())
        statuses, asked = dict[int, RankStatus](), time.monotonic()
        patience_sec = _PATIENCE_SEC + 2 * (self.look_sec - WATCHDOG_SEC)
        polls = growing_polls(shared_poll(_LONGEST_POLL_SEC, len(alarm.ranks)))
        for reports in failure.turns(asked, polls, patience_sec + _JUDGING_SEC):
            is_over = time.monotonic() > asked + patience_sec
            if reports is not None:
                self._collect(alarm, reports, statuses)
                if is_over or statuses.keys() >= set(alarm.ranks):
                    return failure.write(self._judge(alarm, statuses).pack())
        assert failure.verdict is not None
        return failure.verdict

    def count_as_reader(self) -> None:
        """Report that this rank's program gets the newest verdict, or that the watchdog has printed it. Idempotent."""
        if self._concluded is not None:
            self._concluded.count_as_reader()

    def linger(self, readers: int) -> None:
        """Wait a moment until so many ranks have the newest verdict: when this rank ends, torchrun ends the others."""
        with suppress(*STORE_ERRORS), self.store.within(_LINGER_SEC):
            if self._concluded is not None:
                self._concluded.linger(readers, _LINGER_SEC, self.look_sec)

    def _collect(self, alarm: Alarm, reports: Mapping[int, bytes], statuses: dict[int, RankStatus]) -> None:
        """Add the statuses that were reported since; of ranks that can report none any more, the last known ones."""
        for rank, report in reports.items():
            with suppress(ValueError):
                statuses[rank] = replace(RankStatus.unpack(report), rank=rank)
        left = self.read_left()
        for rank in (self.dead(alarm.ranks) | left.keys()) & set(alarm.ranks):
            if rank not in statuses or (rank in left and statuses[rank].left is None):
                statuses[rank] = self._last_known_status(rank, alarm.group)

    def _judge(self, alarm: Alarm, statuses: Mapping[int, RankStatus]) -> GuardFinding:
        all_statuses = [statuses.get(rank) or self._last_known_status(rank, alarm.group) for rank in alarm.ranks]
        finding = diagnosis.find(alarm, all_statuses)
        finding = finding or diagnosis.find_unexplained(alarm.group, alarm.words, alarm.seq, alarm.overdue)
        gone = {*finding.missing, *self.dead(alarm.ranks)}
        idle = {rank for rank, status in statuses.items() if status.is_idle}  # they may never come to print it
        printers = statuses.keys() - gone - idle or statuses.keys() - gone
        alive = set(self.members.ranks) - self.dead(self.members.ranks) - self.read_left().keys()  # in the group or not
        return replace(finding, printer=min(printers, default=self.rank), readers=len(alive))

    # -- ranks that are gone ------------------------------------------------------------------------------------------

    def leave(self, how: str, counts: Mapping[str, int]) -> None:
        """Report that this rank has left the guard, and what it did; local, never waits."""
        if self.is_lost:
            return
        try:
            for group in counts:
                self.store.set(f"words/{self.rank}/{group}", self.own.report_status(group).pack())
            self.store.set(f"position/{self.rank}", self.own.position())
            self._leaving.append(self.rank, Departure(how, counts).pack())
        except STORE_ERRORS:
            self.is_lost = True

    def say_done(self) -> None:
        """This rank needs the store no more; rank 0 waits a moment until all that have joined have reported that."""
        self.store.add("done", 1)
        if self.rank == 0:
            wait_for(lambda: self.store.counted("done") >= self.store.counted("here"), _LAST_LINGER_SEC)

    def read_left(self) -> dict[int, Departure]:
        """Return how each rank left that has; one request to the store where no other one has since."""
        for rank, note in self._leaving.unread().items():
            with suppress(ValueError):  # foreign bytes
                self._left[rank] = Departure.unpack(note)
        return self._left.copy()

    def dead(self, ranks: Collection[int]) -> set[int]:
        """Return those of these ranks that are on this host and have no process any more."""
        with suppress(StoreSilent):  # a wait has its deadline then; a store that is gone ends it at once
            self.members.learn()
        return self.members.dead(ranks)

    def _last_known_status(self, rank: int, group: str) -> RankStatus:
        group, left = group.removesuffix(MESSAGES), self.read_left().get(rank)
        status = RankStatus(rank)
        if (words := self.store.find(f"words/{rank}/{group}")) is not None:
            with suppress(ValueError):
                status = replace(RankStatus.unpack(words), rank=rank)
        elif left is None and (events := self._read_announced(group, rank)):
            status = _status_from_memory(rank, events)
        elif (position := self.store.find(f"position/{rank}")) is not None:
            status = RankStatus(rank, last=position[:_MAX_POSITION_BYTES].decode(errors="replace") or None)
        how, is_dead = None if left is None else left.how, rank in self.dead([rank])
        return replace(status, waits_in=None, left=how, dead=is_dead, stack=None, slept_sec=0.0)

    # -- the watchdog -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Answer for this rank while the main thread is busy elsewhere."""
        try:
            self._note_awake()
            while not self._is_closed.wait(self.look_sec) and self._is_reachable():
                self._note_awake()
                with suppress(StoreSilent), self.store.within(_LOOK_ANSWERS_SEC):
                    self._look()
                self._note_awake()
                self._awake = math.inf  # coming to a verdict may take a while
                self.on_look()
                self._awake = time.monotonic()
        except STORE_ERRORS:
            pass
        finally:
            self._awake = math.inf

    def _look(self) -> None:
        self.members.learn()  # while there is a store to ask
        position, failure = self.own.position(), self.failure
        if position != self._kept_position:
            self.store.set(f"position/{self.rank}", position)
            self._kept_position = position
        alarm = None if failure.verdict is not None else self.alarm()
        if alarm is not None:
            if not failure.has_reported:
                failure.report(self.own.report_status(alarm.group).pack())
            failure.find_verdict()

    def is_watchdog(self) -> bool:
        return threading.current_thread() is self._watchdog

    def _note_awake(self) -> None:
        self.slept_sec()
        self._awake = time.monotonic()

    def slept_sec(self) -> float:
        """Return how long this process ran no Python lately.

        A look that comes much too late shows that no thread ran: the process was stopped, its host had no time for it,
        or one call held the GIL. The other ranks cannot know that, and see one more rank that waits. Another thread may
        ask before the watchdog looks again.
        """
        now = time.monotonic()
        if now - self._awake > _ASLEEP_SEC:
            self._slept_sec, self._woke = now - self._awake, now
        return self._slept_sec if now < self._woke + _LATELY_SEC else 0.0

    def close(self) -> None:
        self._is_closed.set()
        if not self.is_watchdog():
            self._watchdog.join(2 * WATCHDOG_SEC + 1)


def _status_from_memory(rank: int, events: list[Event]) -> RankStatus:
    return RankStatus(rank, events, events[-1].seq, last=events[-1].in_full())
