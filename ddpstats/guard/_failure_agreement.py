"""When something is wrong: one alarm, the status of every rank, one verdict. All through the store.

1. A rank that sees a difference, or has waited too long, raises the alarm: a group, and the number of a collective.
2. Every rank that is alive reports its status: what it ran on that group, what it waits in, where its main thread is.
   A rank that waits does so itself, for any other one its watchdog does. (That thread can look, but not raise in
   another.)
3. The first rank that has the status of all, or whose patience is over, writes the verdict; all raise that text.

The store is read by every rank and trusted by none: what is no status counts as none.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ddpstats._transport.roster import Roster
from ddpstats._transport.store import GLANCE_SEC, STORE_ERRORS, BoundedStore
from ddpstats.guard._diagnosis import find, unexplained
from ddpstats.guard._events import Event
from ddpstats.guard._status import DOUBT, MISSING, NOTHING, GuardFinding, RankStatus

_PATIENCE_SEC = 4.0
POLL_SEC = 0.02
_ASKING_SEC = 3.0
_LINGER_SEC = 2.0
_LAST_LINGER_SEC = 10.0  # all ranks have come to their end, and are about to say so
_WATCHDOG_SEC = 0.25
_MAX_POSITION_BYTES = 2000
MESSAGES = " (point-to-point)"  # after the name of a group


@dataclass(frozen=True)
class Alarm:
    """What is in question.

    ``until``: whether all ranks should have reached ``seq`` by now. ``doubt``: it may turn out to be nothing.
    ``ending``: raised by a rank that has come to the end of its program, and waits in no collective.
    """

    group: str
    words: str
    ranks: tuple[int, ...]
    seq: int
    until: bool
    doubt: bool = False
    ending: bool = False

    @property
    def is_message(self) -> bool:
        return self.group.endswith(MESSAGES)

    def pack(self) -> str:
        return json.dumps([self.group, self.words, self.ranks, self.seq, self.until, self.doubt, self.ending])

    @classmethod
    def unpack(cls, payload: bytes) -> Alarm:
        """Raises ValueError for what `pack` did not write."""
        try:
            group, words, ranks, seq, *flags = json.loads(payload)
            until, doubt, ending = map(bool, flags)
            return cls(str(group), str(words), tuple(int(rank) for rank in ranks), int(seq), until, doubt, ending)
        except TypeError as error:
            raise ValueError(f"not an alarm: {error}") from None


ReportStatus = Callable[[str], RankStatus]
"""This rank's own status in a group, from any of its threads."""

ToldBy = Callable[[str, int], list[Event]]
"""What a rank told of its last collectives in a group, before it issued them."""


class FailureAgreement:
    """This rank's part.

    ``roster``: of all ranks, over the main thread's connection to the store; ``watchdog_store`` is another connection.
    ``position``: the rank's last collective in words, which the watchdog keeps in the store for the case that the
    process dies; ``told_by``: what ranks of this host keep in shared memory for that case. When the store is no longer
    ``is_reachable``, the watchdog ends. ``heard`` is called with each verdict, before anything is raised.
    """

    def __init__(
        self,
        roster: Roster,
        watchdog_store: BoundedStore,
        report_status: ReportStatus,
        position: Callable[[], str],
        told_by: ToldBy,
        is_reachable: Callable[[], bool],
        heard: Callable[[GuardFinding], None],
    ) -> None:
        self.roster, self.rank, self.store = roster, roster.rank, roster.store
        self.verdicts = 0  # so far
        self._report_status, self._told_by, self._heard = report_status, told_by, heard
        self.is_lost = False  # the store does not answer any more
        roster.join()
        self._watchdog = _Watchdog(self, watchdog_store, position, is_reachable)
        self._watchdog.start()

    # -- alarms -------------------------------------------------------------------------------------------------------

    def alarm(self) -> Alarm | None:
        """The alarm that is on, if there is one."""
        return self.alarm_in(self.store)

    def alarm_in(self, store: BoundedStore) -> Alarm | None:
        """`alarm`, over a connection of the caller's own."""
        try:
            with store.within(GLANCE_SEC):
                alarm = store.find(f"alarm/{self.verdicts}")
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

    def asking(self) -> AbstractContextManager[None]:
        """Around the last questions before this rank concludes alone."""
        return self.store.within(GLANCE_SEC if self.is_lost else _ASKING_SEC)

    def raise_alarm(self, alarm: Alarm) -> GuardFinding:
        """Raise the alarm, unless one is on already; the verdict on the one that is on."""
        try:
            while True:
                with self.asking():
                    found = Alarm.unpack(self.store.post(f"alarm/{self.verdicts}", alarm.pack()))
                finding = self.verdict(found)
                if finding.kind not in (NOTHING, DOUBT) or found == alarm:
                    return finding
        except STORE_ERRORS as error:
            return self.without_store(alarm, error)

    def without_store(self, alarm: Alarm, error: BaseException) -> GuardFinding:
        """What this rank knows alone, in words that others who know the same would choose as well."""
        self.is_lost = True
        missing, dead, why = self.roster.known_alone(error, alarm.ranks)
        what = "a message" if alarm.is_message else f"collective number {alarm.seq}"
        lines = [f"{what} of {alarm.words} was not completed:", *self.roster.told_alone(missing, dead)]
        lines.append(f"The store, which could tell who is missing, does not answer: {why}")
        return GuardFinding(MISSING, "\n".join(lines), alarm.group, alarm.seq, missing)

    def declare(self, finding: GuardFinding, alarm: Alarm) -> GuardFinding:
        """Make ``finding`` the verdict, unless an alarm is on already; the verdict on the one that is on."""
        try:
            if self.alarm() is None:
                with self.asking():
                    self.store.post(f"verdict/{self.verdicts}", finding.pack())
        except STORE_ERRORS:
            return finding
        return self.raise_alarm(alarm)

    def another_waits_elsewhere(self, event: Event, ranks: Sequence[int]) -> bool:
        """Whether one of ``ranks`` waits in a collective of the same group and number that is not the same one.

        Says in passing what this rank waits for.
        """
        here = f"{event.group} {event.seq} "
        self.store.set(f"waits/{self.rank}", f"{here}{event.digest}")
        for rank in ranks:
            told = b"" if rank == self.rank else self.store.find(f"waits/{rank}") or b""
            if told.startswith(here.encode()) and told != f"{here}{event.digest}".encode():
                return True
        return False

    def verdict(self, alarm: Alarm) -> GuardFinding:
        """Report this rank's status, and wait for the verdict."""
        number = self.verdicts
        self.report_status(self.store, number, alarm)
        deadline = time.monotonic() + _PATIENCE_SEC
        while (written := self.store.find(f"verdict/{number}")) is None:
            statuses = self._statuses(alarm, number)
            if len(statuses) == len(alarm.ranks) or time.monotonic() > deadline:
                written = self.store.post(f"verdict/{number}", self._judge(alarm, statuses).pack())
                break
            time.sleep(POLL_SEC)
        try:
            finding = GuardFinding.unpack(written)
        except ValueError:  # not one of ours
            finding = unexplained(alarm.group, alarm.words, alarm.seq, alarm.until)
        self._heard(finding)
        self.store.set(f"read/{number}/{self.rank}", "1")
        if self.rank == 0:
            self._linger(alarm, number)
        self.verdicts += 1
        return finding

    def report_status(self, store: BoundedStore, number: int, alarm: Alarm) -> None:
        """Say what this rank knows of itself, for the verdict of that number."""
        store.set(f"status/{number}/{self.rank}", self._report_status(alarm.group).pack())

    def _linger(self, alarm: Alarm, number: int) -> None:
        """Rank 0 often serves the store, and what it raises next may be its end: let the others read the verdict."""
        dead = self.dead(alarm.ranks)
        listening = [rank for rank in alarm.ranks if self.store.check([f"status/{number}/{rank}"])]
        waiting = [rank for rank in listening if rank not in dead and self.has_left(rank) is None]
        wait_until(lambda: self.store.check([f"read/{number}/{rank}" for rank in waiting]), _LINGER_SEC)

    def _judge(self, alarm: Alarm, statuses: Mapping[int, RankStatus]) -> GuardFinding:
        dead = self.dead(alarm.ranks)
        everyone = [
            statuses.get(rank) or self._last_known_status(rank, alarm.group, rank in dead) for rank in alarm.ranks
        ]
        found = find(alarm.group, alarm.words, everyone, alarm.seq if alarm.until else None)
        if found is None and alarm.doubt:  # labels may differ for good reasons
            return GuardFinding(NOTHING, "", alarm.group, alarm.seq)
        return found or unexplained(alarm.group, alarm.words, alarm.seq, alarm.until)

    def _statuses(self, alarm: Alarm, number: int) -> dict[int, RankStatus]:
        """Those that were reported, and of ranks that can report none any more what was known of them last."""
        found: dict[int, RankStatus] = {}
        for rank in alarm.ranks:
            reported = self.store.find(f"status/{number}/{rank}")
            if reported is not None:
                found[rank] = RankStatus.unpack(reported, rank)
        for rank in self.dead([rank for rank in alarm.ranks if rank not in found]):
            found[rank] = self._last_known_status(rank, alarm.group, True)
        for rank in alarm.ranks:
            if rank not in found and self.has_left(rank) is not None:
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
            told = json.dumps({"how": how, "counts": dict(counts), "last": last})
            self.store.set(f"left/{self.rank}", told)
            self.store.set("left", "1")
        except STORE_ERRORS:
            self.is_lost = True

    def say_done(self) -> None:
        """This rank needs the store no more; rank 0 waits a moment until all have said so."""
        self.store.set(f"done/{self.rank}", "1")
        if self.rank == 0:
            everyone = [f"done/{rank}" for rank in self.roster.ranks]
            wait_until(lambda: self.store.check(everyone), _LAST_LINGER_SEC, 0.002)

    def someone_left(self) -> bool:
        """Whether any rank has left; one question to the store."""
        return not self.is_lost and bool(self.store.check(["left"]))

    def has_left(self, rank: int) -> dict[str, Any] | None:
        """How a rank left, or None."""
        told = self.store.find(f"left/{rank}")
        try:
            found = None if told is None else json.loads(told)
        except ValueError:
            return None
        return found if isinstance(found, dict) and isinstance(found.get("counts"), dict) else None

    def dead(self, ranks: Collection[int]) -> set[int]:
        """Which of these ranks, on this host, have no process any more."""
        self.roster.learn(ranks)
        return self.roster.dead(ranks)

    def are_dead(self, ranks: Collection[int]) -> bool:
        """Whether none of them, all on this host, has a process any more."""
        return len(self.dead(ranks)) == len(ranks)

    def last_known(self, rank: int, group: str) -> RankStatus:
        """What is known of a rank that is not asked."""
        return self._last_known_status(rank, group, bool(self.dead([rank])))

    def _last_known_status(self, rank: int, group: str, dead: bool) -> RankStatus:
        words, left = self.store.find(f"words/{rank}/{group}"), self.has_left(rank)
        said = RankStatus(rank) if words is None else RankStatus.unpack(words, rank)
        how, last = (str(left.get("how")), left.get("last")) if left is not None else (None, None)
        if last is None and (position := self.store.find(f"position/{rank}")) is not None:
            last = position[:_MAX_POSITION_BYTES].decode(errors="replace")
        told = () if said.events or left is not None else self._told_by(group, rank)
        if told:
            balances = {event.seq: event.balance for event in told if event.balance}
            said = RankStatus(rank, told, balances, told[-1].seq, last=str(told[-1]))
        return RankStatus(
            rank,
            said.events,
            said.balances,
            said.count,
            None,
            str(last) if last else said.last,
            how,
            dead,
        )

    def close(self) -> None:
        self._watchdog.stop()


def wait_until(is_so: Callable[[], bool], seconds: float, poll_sec: float = POLL_SEC) -> None:
    """Wait for that, and for no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_so():
        time.sleep(poll_sec)


class _Watchdog(threading.Thread):
    """Reports this rank's status while the main thread is busy elsewhere."""

    def __init__(
        self,
        agreement: FailureAgreement,
        store: BoundedStore,
        position: Callable[[], str],
        is_reachable: Callable[[], bool],
    ) -> None:
        super().__init__(name="ddpstats-guard", daemon=True)
        self._agreement, self._store, self._stopped = agreement, store, threading.Event()
        self._position, self._is_reachable = position, is_reachable

    def run(self) -> None:
        answered, told = -1, ""
        agreement = self._agreement
        while not self._stopped.wait(_WATCHDOG_SEC) and self._is_reachable():
            try:
                agreement.roster.learn(agreement.roster.ranks, self._store)  # while there is somebody to ask
                position = self._position()
                if position != told:
                    self._store.set(f"position/{agreement.rank}", position)
                    told = position
                number = agreement.verdicts
                alarm = None if answered == number else agreement.alarm_in(self._store)
                if alarm is None:
                    continue
                if not self._store.check([f"status/{number}/{agreement.rank}"]):
                    agreement.report_status(self._store, number, alarm)
                answered = number
            except STORE_ERRORS:
                return

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2 * _WATCHDOG_SEC + 1)
