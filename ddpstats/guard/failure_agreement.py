"""When something is wrong: one alarm, the status of every rank, one verdict. All through the store.

1. A rank that sees a difference, or has waited too long, raises the alarm: a group, and the number of a collective.
2. Every rank that is alive reports its status: what it ran on that group, what it waits in, where its main thread is.
   The main thread of a rank that waits does so; the rank's watchdog does where the main thread is busy elsewhere.
3. One rank, the first to come, reads the status of all until it has them or its patience is over, and writes the
   verdict; all raise that text. Another rank does so where it does not.
4. The watchdog reads the verdict, too, so that the main thread raises it also where the store is gone by then.

The store is read by every rank and trusted by none: what is no status counts as none. It is one thread that answers
all ranks, so a rank asks of no other one by one while it waits.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddpstats._base.files import parse_json
from ddpstats._base.text import ranks_text
from ddpstats._ranks.failure import Membership
from ddpstats._ranks.store import GLANCE_SEC, STORE_ERRORS, StoreLog, StoreSilent, growing_polls, shared_poll
from ddpstats.guard.diagnosis import call_lines, find, unexplained
from ddpstats.guard.event import MESSAGES, Event
from ddpstats.guard.status import DOUBT, MISMATCH, MISSING, NOTHING, GuardFinding, RankStatus

WATCHDOG_SEC = 0.25
_ASLEEP_SEC = 1.0  # a busy machine lets a thread wait for less
_LOOKING_SEC = 3.0  # of a look, where threads of Python run
_LATELY_SEC = 5.0  # from the end of a sleep: for as long as others may be about to judge
_LOOK_ANSWERS_SEC = 2.0  # of all answers of the store in one look
_PATIENCE_SEC = 4.0
_JUDGING_SEC = 2.0  # from then on another rank judges
_POLL_SEC = 0.02  # torchrun ends all other ranks within 0.1 s of the first that ends
_LONGEST_POLL_SEC = 0.1
_ASKING_SEC = 3.0
_LINGER_SEC = 2.0
_LAST_LINGER_SEC = 10.0  # all ranks have come to their end, and are about to say so
_MAX_POSITION_BYTES = 2000


@dataclass(frozen=True)
class Alarm:
    """An alarm says what is in question.

    ``overdue``: whether all ranks should have reached ``seq`` by now. ``tentative``: it may turn out to be nothing.
    ``ending``: raised by a rank that has come to the end of its program, and waits in no collective.
    """

    group: str
    words: str
    ranks: tuple[int, ...]
    seq: int
    overdue: bool
    tentative: bool = False
    ending: bool = False

    @property
    def is_message(self) -> bool:
        return self.group.endswith(MESSAGES)

    def pack(self) -> str:
        flags = self.overdue, self.tentative, self.ending
        return json.dumps([self.group, self.words, self.ranks, self.seq, *flags])

    @classmethod
    def unpack(cls, payload: bytes) -> Alarm:
        """Raises ValueError for what `pack` did not write."""
        try:
            group, words, ranks, seq, *flags = parse_json(payload)
            overdue, tentative, ending = map(bool, flags)
            return cls(str(group), str(words), tuple(map(int, ranks)), int(seq), overdue, tentative, ending)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not an alarm: {error}") from None


ReportStatus = Callable[[str], RankStatus]
"""This rank's own status in a group, from any of its threads."""

ToldBy = Callable[[str, int], list[Event]]
"""What a rank told of its last collectives in a group, before it issued them."""


class _Verdict(NamedTuple):
    """A verdict that this rank's watchdog has read, and the alarm that it is on."""

    number: int
    alarm: Alarm
    payload: bytes


class FailureAgreement:
    """This rank's part.

    ``roster``: of all ranks. ``position``: the rank's last collective in words, which the watchdog keeps in the store
    for the case that the process dies; ``told_by``: what ranks of this host keep in shared memory for that case. When
    the store is no longer ``is_reachable``, the watchdog ends. ``heard`` is called with each verdict, before it is
    raised.
    """

    def __init__(
        self,
        roster: Membership,
        report_status: ReportStatus,
        position: Callable[[], str],
        told_by: ToldBy,
        is_reachable: Callable[[], bool],
        heard: Callable[[GuardFinding], None],
    ) -> None:
        self.roster, self.rank, self.store = roster, roster.rank, roster.store
        self.verdicts = 0  # so far
        self._lock = threading.Lock()  # of that number
        self._read: _Verdict | None = None
        self.has_unread = False  # a verdict that the watchdog has read, and no other thread has come to
        self._report_status, self._told_by, self._heard = report_status, told_by, heard
        self.is_lost = False  # the store does not answer any more
        self._left: dict[int, dict[str, Any]] = {}
        self._leaving = StoreLog(self.store, "left")
        self.look_sec = shared_poll(WATCHDOG_SEC, len(roster.ranks))  # how often a watchdog looks
        self._waits = ""  # a key in the store
        self._position, self._kept_position, self._answered = position, "", -1
        roster.join()
        self._watchdog = Watchdog(self._look, is_reachable, self.look_sec)
        self._watchdog.start()

    # -- alarms -------------------------------------------------------------------------------------------------------

    def alarm(self) -> Alarm | None:
        """The alarm that is on, if there is one."""
        known = self._read_verdict(self.verdicts)
        if known is not None:
            return known.alarm
        try:
            with self.store.within(GLANCE_SEC):
                alarm = self.store.find(f"alarm/{self.verdicts}")
            self.is_lost = False
            return None if alarm is None else Alarm.unpack(alarm)
        except ValueError:  # not one of ours
            return None
        except STORE_ERRORS:
            self.is_lost = True
            return None

    def glancing(self) -> AbstractContextManager[None]:
        """Around questions that are asked again and again: raises `StoreSilent` soon, which says nothing yet."""
        return self.store.within(GLANCE_SEC)

    def asking(self, at_least_sec: float = 0.0) -> AbstractContextManager[None]:
        """Around the last questions before this rank concludes alone."""
        return self.store.within(max(at_least_sec, GLANCE_SEC if self.is_lost else _ASKING_SEC))

    def raise_alarm(self, alarm: Alarm, at_least_sec: float = 0.0) -> GuardFinding:
        """Raise the alarm, unless one is on already; the verdict on the one that is on.

        ``at_least_sec``: how long the store may be silent, where that is longer than usual.
        """
        try:
            while True:
                number = self.verdicts
                known = self._read_verdict(number)
                if known is None:
                    with self.asking(at_least_sec):
                        current = Alarm.unpack(self.store.post(f"alarm/{number}", alarm.pack()))
                else:
                    current = known.alarm
                finding = self._verdict(current, number)
                if finding.kind not in (NOTHING, DOUBT) or current == alarm:
                    return finding
        except STORE_ERRORS as error:
            return self.without_store(alarm, error)

    def without_store(self, alarm: Alarm, error: BaseException) -> GuardFinding:
        """The verdict that the watchdog has read; otherwise what this rank can conclude alone."""
        self.is_lost = True
        known = self._read_verdict(self.verdicts)
        if known is not None:
            return self._verdict(known.alarm, known.number)
        mismatch = self.compare_memory(alarm)
        if mismatch is not None:
            return mismatch
        lost = self.roster.diagnose_without_store(error, alarm.ranks)
        what = "a message" if alarm.is_message else f"collective number {alarm.seq}"
        own = self._own_call(alarm)
        lines = [f"{what} of {alarm.words} was not completed:", *own, *lost.lines]
        first = ranks_text(lost.missing) if lost.missing else "all ranks"
        lines.append(f"Look at the output of {first} first.")
        lines.append(f"The store, which could tell who is missing, does not answer: {lost.why}")
        return GuardFinding(MISSING, "\n".join(lines), alarm.group, alarm.seq, lost.missing)

    def _own_call(self, alarm: Alarm) -> list[str]:
        """Return lines that say what this rank itself called, and where."""
        status = self._report_status(alarm.group)
        event = status.message_waited_for() if alarm.is_message else status.at(alarm.seq)
        return [] if event is None else call_lines([self.rank], event)

    def compare_memory(self, alarm: Alarm) -> GuardFinding | None:
        """Return a mismatch that shows in this host's memory: gloo ends a process that gets more than it expects."""
        dead = self.roster.dead(alarm.ranks)
        statuses = []
        for rank in alarm.ranks:
            events = [] if rank == self.rank else self._told_by(alarm.group, rank)
            if rank == self.rank:
                statuses.append(self._report_status(alarm.group))
            elif events:
                statuses.append(_status_from_memory(rank, events, rank in dead))
            else:
                return None
        finding = find(alarm.group, alarm.words, statuses)
        return finding if finding is not None and finding.kind == MISMATCH else None

    def another_waits_elsewhere(self, event: Event) -> bool:
        """Return whether a rank has waited in a collective of the same group and number that is not the same one.

        Says in passing what this rank waits for, where it is the first that waits there.
        """
        key, mine = f"waits/{event.group}/{event.seq}", str(event.digest)
        if self.store.post(key, mine) != mine.encode():
            return True
        if self._waits and self._waits != key:
            self.store.delete_key(self._waits)
        self._waits = key
        return False

    def _verdict(self, alarm: Alarm, number: int) -> GuardFinding:
        """Report this rank's status, and wait for the verdict of that number. Several threads may do so at once."""
        known = self._read_verdict(number)
        if known is None:
            self.report_status(number, alarm)
        try:
            finding = GuardFinding.unpack(self._written(alarm, number) if known is None else known.payload)
        except ValueError:  # not one of ours
            finding = unexplained(alarm.group, alarm.words, alarm.seq, alarm.overdue)
        with self._lock:
            is_first = self.verdicts == number
            if is_first:
                self._heard(finding)
                self.verdicts += 1
        if is_first:
            with contextlib.suppress(*STORE_ERRORS):
                self.store.set(f"read/{number}/{self.rank}", "1")
                if self.rank == 0:
                    self._linger(alarm, number)
        return finding

    def pending_alarm(self) -> Alarm | None:
        """Return the alarm on which the watchdog has read a verdict that no other thread has come to."""
        self.has_unread, known = False, self._read
        return known.alarm if known is not None and known.number == self.verdicts else None

    def _read_verdict(self, number: int) -> _Verdict | None:
        known = self._read
        return known if known is not None and known.number == number else None

    def _written(self, alarm: Alarm, number: int) -> bytes:
        """The verdict of that number, by whichever rank."""
        mine = str(self.rank)
        judges = self.store.post(f"judge/{number}", mine) == mine.encode()
        patience_over = time.monotonic() + _PATIENCE_SEC + 2 * (self.look_sec - WATCHDOG_SEC)
        judges_from = patience_over + _JUDGING_SEC
        for poll_sec in growing_polls(shared_poll(_LONGEST_POLL_SEC, len(alarm.ranks))):
            written = self.store.find(f"verdict/{number}")
            if written is not None:
                return written
            now = time.monotonic()
            may_judge = judges or now > judges_from
            if may_judge and (now > patience_over or self._have_reported(alarm, number)):
                statuses = self._statuses(alarm, number)
                if len(statuses) == len(alarm.ranks) or now > patience_over:
                    finding = self._judge(alarm, statuses)
                    finding = replace(finding, printer=self._printer(alarm, finding, statuses))
                    return self.store.post(f"verdict/{number}", finding.pack())
            time.sleep(poll_sec)
        raise AssertionError("polls do not end")

    def report_status(self, number: int, alarm: Alarm) -> None:
        """Say what this rank knows of itself, for the verdict of that number."""
        self.store.set(f"status/{number}/{self.rank}", self._report_status(alarm.group).pack())
        self.store.add(f"reported/{number}", 1)

    def _have_reported(self, alarm: Alarm, number: int) -> bool:
        """Return whether it is worth reading the statuses of all; not certain, for a rank may report twice."""
        gone = self.dead(alarm.ranks) | self.left().keys()
        return self.store.counted(f"reported/{number}") + len(gone) >= len(alarm.ranks)

    def _linger(self, alarm: Alarm, number: int) -> None:
        """Rank 0 often serves the store, and what it raises next may be its end: let the others read the verdict."""
        dead = self.dead(alarm.ranks)
        silent = set(self.store.absent([f"status/{number}/{rank}" for rank in alarm.ranks]))
        left = self.left()
        listening = [rank for rank in alarm.ranks if f"status/{number}/{rank}" not in silent]
        waiting = [rank for rank in listening if rank not in dead and rank not in left]
        wait_until(lambda: self.store.check([f"read/{number}/{rank}" for rank in waiting]), _LINGER_SEC)

    def _judge(self, alarm: Alarm, statuses: Mapping[int, RankStatus]) -> GuardFinding:
        dead = self.dead(alarm.ranks)
        everyone = [
            statuses.get(rank) or self._last_known_status(rank, alarm.group, rank in dead) for rank in alarm.ranks
        ]
        overdue = alarm.seq if alarm.overdue else None
        found = find(alarm.group, alarm.words, everyone, overdue, alarm.tentative)
        if found is None and alarm.tentative:  # labels may differ for good reasons
            return GuardFinding(NOTHING, "", alarm.group, alarm.seq, doubts=_labelled_by_some(everyone))
        return found or unexplained(alarm.group, alarm.words, alarm.seq, alarm.overdue)

    def _printer(self, alarm: Alarm, finding: GuardFinding, statuses: Mapping[int, RankStatus]) -> int:
        """Return the lowest rank that is alive, as far as is known, and not missing: it prints the verdict whole."""
        gone = {*finding.missing, *self.dead(alarm.ranks)}
        return min((rank for rank in statuses if rank not in gone), default=self.rank)

    def _statuses(self, alarm: Alarm, number: int) -> dict[int, RankStatus]:
        """Return the statuses that were reported; of ranks that can report none any more, the last that was known."""
        keys = {rank: f"status/{number}/{rank}" for rank in alarm.ranks}
        silent = set(self.store.absent(list(keys.values())))
        keys = {rank: key for rank, key in keys.items() if key not in silent}
        told = self.store.multi_get(list(keys.values())) if keys else []
        found = {rank: RankStatus.unpack(status, rank) for rank, status in zip(keys, told, strict=True)}
        for rank in self.dead([rank for rank in alarm.ranks if rank not in found]):
            found[rank] = self._last_known_status(rank, alarm.group, True)
        for rank in self.left():
            if rank in alarm.ranks and (rank not in found or found[rank].left is None):  # it left since
                found[rank] = self._last_known_status(rank, alarm.group, False)
        return found

    # -- ranks that are gone ------------------------------------------------------------------------------------------

    def leave(self, how: str, counts: Mapping[str, int], last: str | None, statuses: Mapping[str, RankStatus]) -> None:
        """Tell the others that this rank has left the guard, and what it did; local, never waits."""
        if self.is_lost:
            return
        try:
            for group, status in statuses.items():
                self.store.set(f"words/{self.rank}/{group}", status.pack())
            self._leaving.append(json.dumps({"rank": self.rank, "how": how, "counts": dict(counts), "last": last}))
        except STORE_ERRORS:
            self.is_lost = True

    def say_done(self) -> None:
        """This rank needs the store no more; rank 0 waits a moment until all that have joined have said so."""
        self.store.add("done", 1)
        if self.rank == 0:
            wait_until(lambda: self.store.counted("done") >= self.store.counted("here"), _LAST_LINGER_SEC)

    def left(self) -> dict[int, dict[str, Any]]:
        """Return how each rank left that has; one request to the store where no other one has since."""
        for told in self._leaving.unread():
            left = _parsed(told)
            if left:
                self._left[left["rank"]] = left
        return self._left.copy()

    def dead(self, ranks: Collection[int]) -> set[int]:
        """Return those of these ranks that are on this host and have no process any more."""
        self.roster.learn()
        return self.roster.dead(ranks)

    def _last_known_status(self, rank: int, group: str, dead: bool) -> RankStatus:
        group = group.removesuffix(MESSAGES)
        words, left = self.store.find(f"words/{rank}/{group}"), self.left().get(rank)
        said = RankStatus(rank) if words is None else RankStatus.unpack(words, rank)
        how, last = (str(left.get("how")), left.get("last")) if left is not None else (None, None)
        if last is None and (position := self.store.find(f"position/{rank}")) is not None:
            last = position[:_MAX_POSITION_BYTES].decode(errors="replace")
        events = [] if said.events or left is not None else self._told_by(group, rank)
        if events:
            said = _status_from_memory(rank, events, dead)
            last = said.last if _is_older(last, group, events[-1].seq) else last
        last = str(last) if last else said.last
        return replace(said, waits_in=None, last=last, left=how, dead=dead, stack=None, slept_sec=0.0)

    def _look(self) -> None:
        """What the watchdog does a few times a second."""
        with self.store.within(_LOOK_ANSWERS_SEC):
            self._look_once()

    def _look_once(self) -> None:
        self.roster.learn()  # while there is a store to ask
        position, number = self._position(), self.verdicts
        if position != self._kept_position:
            self.store.set(f"position/{self.rank}", position)
            self._kept_position = position
        alarm = None if self._read_verdict(number) else self.alarm()
        if alarm is None:
            return
        if self._answered != number and not self.store.check([f"status/{number}/{self.rank}"]):
            self.report_status(number, alarm)
        self._answered = number
        payload = self.store.find(f"verdict/{number}")
        if payload is not None:
            self._read = _Verdict(number, alarm, payload)
            self.has_unread = True
            self.store.set(f"read/{number}/{self.rank}", "1")

    def slept_sec(self) -> float:
        """Return how long this process ran no Python lately."""
        return self._watchdog.slept_sec()

    def close(self) -> None:
        self._watchdog.stop()


def _status_from_memory(rank: int, events: list[Event], is_dead: bool) -> RankStatus:
    return RankStatus(rank, events, events[-1].seq, last=events[-1].in_full(), dead=is_dead)


def _is_older(position: str | None, group: str, seq: int) -> bool:
    """Return whether what a watchdog kept of a rank is a number of the group before ``seq``: it looks now and then."""
    number, _, _ = (position or "").removeprefix("number ").partition(f" of group {group!r}, ")
    return number.isdecimal() and int(number) < seq


def _labelled_by_some(statuses: list[RankStatus]) -> tuple[int, ...]:
    """The numbers of collectives for which some ranks have a label and others have none."""
    words: dict[int, set[bool]] = {}
    for status in statuses:
        for event in status.events:
            words.setdefault(event.seq, set()).add(bool(event.word))
    return tuple(seq for seq, labelled in sorted(words.items()) if len(labelled) > 1)


def _parsed(told: bytes) -> dict[str, Any]:
    """Return how a rank left; empty for bytes that this module has not written."""
    try:
        found = parse_json(told)
    except ValueError:
        return {}
    is_ours = isinstance(found, dict) and isinstance(found.get("counts"), dict) and type(found.get("rank")) is int
    return found if is_ours else {}


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait for that, and for no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    for poll_sec in growing_polls(_POLL_SEC):
        if time.monotonic() > deadline or is_so():
            return
        time.sleep(poll_sec)


# -- the watchdog -----------------------------------------------------------------------------------------------------


class Watchdog(threading.Thread):
    """A thread that answers for this rank while the main thread is busy elsewhere.

    A look that comes much too late tells that no thread of Python's ran: the process was stopped, its host had no time
    for it, or one call held the GIL. The other ranks cannot know that, and see one more rank that waits.
    """

    def __init__(self, look: Callable[[], None], is_reachable: Callable[[], bool], every_sec: float) -> None:
        super().__init__(name="ddpstats-guard", daemon=True)
        self._look, self._is_reachable, self._every_sec = look, is_reachable, every_sec
        self._stopped = threading.Event()
        self._due = math.inf  # when the next look is to come, or this one to be over
        self._slept_sec, self._woke = 0.0, -math.inf

    def run(self) -> None:
        try:
            while self._is_time() and self._is_reachable():
                with contextlib.suppress(StoreSilent):
                    self._look()
        except STORE_ERRORS:
            pass
        finally:
            self._due = math.inf

    def _is_time(self) -> bool:
        """Wait for the next look; False where there is none any more."""
        self.slept_sec()  # in the look that is over
        self._due = time.monotonic() + self._every_sec
        has_ended = self._stopped.wait(self._every_sec)
        self.slept_sec()
        self._due = time.monotonic() + _LOOKING_SEC
        return not has_ended

    def slept_sec(self) -> float:
        """Return how long this process ran no Python lately. Another thread may ask before this one looks."""
        now = time.monotonic()
        late_sec = now - self._due
        if late_sec > _ASLEEP_SEC:
            self._slept_sec, self._woke = late_sec, now
        return self._slept_sec if now < self._woke + _LATELY_SEC else 0.0

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2 * WATCHDOG_SEC + 1)
