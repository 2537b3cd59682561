"""When something is wrong: one alarm, what every rank testifies, one verdict. All through the store.

1. A rank that sees a difference, or has waited too long, raises the alarm: a group, and the number of a collective.
2. Every rank that is alive testifies: what it ran on that group, what it waits in, where its main thread is. A rank
   that waits does so itself, for any other one its watchdog does. (That thread can look, but not raise in another.)
3. The first rank that has all testimonies, or whose patience is over, writes the verdict; all raise that text.

The store is read by every rank and trusted by none: what is no testimony counts as none.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats._transport.mailbox import PROCESS_ID_BYTES, ProcessId
from ddpstats._transport.store import GLANCE_SEC, STORE_ERRORS, StoreGone, StoreSilent, bounded
from ddpstats.guard._diagnosis import DOUBT, MISSING, NOTHING, GuardFinding, RankStatus, find, unexplained
from ddpstats.guard._events import Event, events_as_dicts, events_from_dicts

_PATIENCE_SEC = 4.0
_POLL_SEC = 0.02
_ASKING_SEC = 3.0
_LINGER_SEC = 2.0
_LAST_LINGER_SEC = 10.0  # all ranks have come to their end, and are about to say so
_TELLING_SEC = 5.0
_WATCHDOG_SEC = 0.25
_MAX_BYTES = 4 << 20
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


Testify = Callable[[str], RankStatus]
"""This rank's testimony about a group, from any of its threads."""

ToldBy = Callable[[str, int], list[Event]]
"""What a rank told of its last collectives in a group, before it issued them."""


class FailureAgreement:
    """This rank's part.

    ``stores``: two connections to the store, one for the main thread, one for the watchdog. ``position``: the rank's
    last collective in words, which the watchdog keeps in the store for the case that the process dies; ``told_by``:
    what ranks of this host keep in shared memory for that case. When the store is no longer ``is_reachable``, the
    watchdog ends. ``heard`` is called with each verdict, before anything is raised.
    """

    def __init__(
        self,
        stores: tuple[Any, Any],
        rank: int,
        world_size: int,
        testify: Testify,
        position: Callable[[], str],
        told_by: ToldBy,
        is_reachable: Callable[[], bool],
        heard: Callable[[GuardFinding], None],
    ) -> None:
        self._told_by = told_by
        self._rank, self._testify, self._position, self._is_reachable = rank, testify, position, is_reachable
        self._heard = heard
        self._store, self._world_size = bounded(stores[0]), world_size
        self._verdicts = 0
        self._peers: dict[int, ProcessId] = {}
        self._lost = False  # the store does not answer any more
        self._store.set(f"process/{rank}", ProcessId.mine().pack())
        self._watchdog = _Watchdog(self, stores[1])
        self._watchdog.start()

    @property
    def rank(self) -> int:
        return self._rank

    # -- alarms -------------------------------------------------------------------------------------------------------

    def alarm(self) -> Alarm | None:
        """The alarm that is on, if there is one."""
        return self.alarm_in(self._store)

    def alarm_in(self, store: Any) -> Alarm | None:
        """`alarm`, over a connection of the caller's own."""
        key = f"alarm/{self._verdicts}"
        try:
            with store.within(GLANCE_SEC):
                alarm = store.get(key) if store.check([key]) else None
            self._lost = False
            return None if alarm is None else Alarm.unpack(alarm)
        except ValueError:  # not one of ours
            return None
        except STORE_ERRORS:
            self._lost = True
            return None

    def glancing(self) -> AbstractContextManager[None]:
        """Around questions that are asked again and again: raises `StoreSilent` soon, which says nothing yet."""
        return self._store.within(GLANCE_SEC)

    def asking(self) -> AbstractContextManager[None]:
        """Around the last questions before this rank concludes alone."""
        return self._store.within(GLANCE_SEC if self._lost else _ASKING_SEC)

    def raise_alarm(self, alarm: Alarm) -> GuardFinding:
        """Raise the alarm, unless one is on already; the verdict on the one that is on."""
        try:
            while True:
                with self.asking():
                    found = Alarm.unpack(self._store.compare_set(f"alarm/{self._verdicts}", "", alarm.pack()))
                finding = self.verdict(found)
                if finding.kind not in (NOTHING, DOUBT) or found == alarm:
                    return finding
        except STORE_ERRORS as error:
            return self.without_store(alarm, error)

    def without_store(self, alarm: Alarm, error: BaseException) -> GuardFinding:
        """What this rank knows alone, in words that others who know the same would choose as well."""
        self._lost = True
        host = self._store.host_rank
        is_silent = isinstance(error, StoreSilent)
        is_gone = isinstance(error, StoreGone) or (not is_silent and self._store.is_gone())
        gone = [rank for rank in alarm.ranks if rank in self._peers and self._peers[rank].is_dead()]
        if host is not None and (is_gone or host in gone):
            gone = [host]
        what = "a message" if alarm.is_message else f"collective number {alarm.seq}"
        lines = [f"{what} of {alarm.words} was not completed:"]
        lines += [f"  {ranks_text(gone)}: the process is gone"] if gone else []
        machine, elsewhere = ProcessId.mine().machine, list[int]()
        if is_silent and not gone:
            elsewhere = [rank for rank in self._peers if self._peers[rank].machine != machine]
            elsewhere = sorted(set(elsewhere).intersection(alarm.ranks))
        if elsewhere:
            lines.append(f"  this host is cut off: the store does not answer; {ranks_text(elsewhere)} of other hosts")
        elif is_silent and not gone and host is not None and host != self._rank:
            elsewhere = [host]
            lines.append(f"  {ranks_text(elsewhere)}: serves the store, which does not answer")
        why = "nobody serves it any more" if is_gone else str(error).strip().split("\n", 1)[0]
        lines.append(f"The store, which could tell who is missing, does not answer: {why}")
        return GuardFinding(MISSING, "\n".join(lines), alarm.group, alarm.seq, tuple(gone or elsewhere))

    def declare(self, finding: GuardFinding, alarm: Alarm) -> GuardFinding:
        """Make ``finding`` the verdict, unless an alarm is on already; the verdict on the one that is on."""
        try:
            if self.alarm() is None:
                with self.asking():
                    self._store.compare_set(f"verdict/{self._verdicts}", "", _pack_finding(finding))
        except STORE_ERRORS:
            return finding
        return self.raise_alarm(alarm)

    def another_waits_elsewhere(self, event: Event, ranks: Sequence[int]) -> bool:
        """Whether one of ``ranks`` waits in a collective of the same group and number that is not the same one.

        Says in passing what this rank waits for.
        """
        here = f"{event.group} {event.seq} "
        self._store.set(f"waits/{self._rank}", f"{here}{event.digest}")
        for rank in ranks:
            key = f"waits/{rank}"
            if rank != self._rank and self._store.check([key]):
                told = self._store.get(key).decode(errors="replace")
                if told.startswith(here) and told != f"{here}{event.digest}":
                    return True
        return False

    def verdict(self, alarm: Alarm) -> GuardFinding:
        """Testify, and wait for the verdict."""
        store, number = self._store, self._verdicts
        store.set(f"testimony/{number}/{self._rank}", _pack(self._testify(alarm.group)))
        deadline = time.monotonic() + _PATIENCE_SEC
        key = f"verdict/{number}"
        while not store.check([key]):
            testimonies = self._testimonies(alarm, number)
            if len(testimonies) == len(alarm.ranks) or time.monotonic() > deadline:
                store.compare_set(key, "", _pack_finding(self._judge(alarm, testimonies)))
                break
            time.sleep(_POLL_SEC)
        finding = _unpack_finding(store.get(key), alarm)
        self._heard(finding)
        store.set(f"read/{number}/{self._rank}", "1")
        if self._rank == 0:
            self._linger(alarm, number)
        self._verdicts += 1
        return finding

    def _linger(self, alarm: Alarm, number: int) -> None:
        """Rank 0 often serves the store, and what it raises next may be its end: let the others read the verdict."""
        deadline = time.monotonic() + _LINGER_SEC
        dead = self.dead(alarm.ranks)
        listening = [rank for rank in alarm.ranks if self._store.check([f"testimony/{number}/{rank}"])]
        waiting = [rank for rank in listening if rank not in dead and self.has_left(rank) is None]
        while time.monotonic() < deadline and not self._store.check([f"read/{number}/{rank}" for rank in waiting]):
            time.sleep(_POLL_SEC)

    def _judge(self, alarm: Alarm, testimonies: Mapping[int, RankStatus]) -> GuardFinding:
        dead = self.dead(alarm.ranks)
        everyone = [
            testimonies.get(rank) or self._last_known_status(rank, alarm.group, rank in dead) for rank in alarm.ranks
        ]
        found = find(alarm.group, alarm.words, everyone, alarm.seq if alarm.until else None)
        if found is None and alarm.doubt:  # labels may differ for good reasons
            return GuardFinding(NOTHING, "", alarm.group, alarm.seq)
        return found or unexplained(alarm.group, alarm.words, alarm.seq, alarm.until)

    def _testimonies(self, alarm: Alarm, number: int) -> dict[int, RankStatus]:
        """Those that are there, and of ranks that can give none any more their last words."""
        found: dict[int, RankStatus] = {}
        for rank in alarm.ranks:
            key = f"testimony/{number}/{rank}"
            if self._store.check([key]):
                found[rank] = _unpack(self._store.get(key), rank)
        for rank in self.dead([rank for rank in alarm.ranks if rank not in found]):
            found[rank] = self._last_known_status(rank, alarm.group, True)
        for rank in alarm.ranks:
            if rank not in found and self.has_left(rank) is not None:
                found[rank] = self._last_known_status(rank, alarm.group, False)
        return found

    # -- ranks that are gone ------------------------------------------------------------------------------------------

    def leave(
        self, how: str, counts: Mapping[str, int], last: str | None, testimonies: Mapping[str, RankStatus]
    ) -> None:
        """Tell the others that this rank has left the guard, and what it did; local, never waits."""
        if self._lost:
            return
        try:
            for group, testimony in testimonies.items():
                self._store.set(f"words/{self._rank}/{group}", _pack(testimony))
            told = json.dumps({"how": how, "counts": dict(counts), "last": last})
            self._store.set(f"left/{self._rank}", told)
            self._store.set("left", "1")
        except STORE_ERRORS:
            self._lost = True

    def say_done(self) -> None:
        """This rank needs the store no more; rank 0 waits a moment until all have said so."""
        self._store.set(f"done/{self._rank}", "1")
        if self._rank == 0:
            deadline = time.monotonic() + _LAST_LINGER_SEC
            everyone = [f"done/{rank}" for rank in range(self._world_size)]
            while time.monotonic() < deadline and not self._store.check(everyone):
                time.sleep(0.002)

    def someone_left(self) -> bool:
        """Whether any rank has left; one question to the store."""
        return not self._lost and bool(self._store.check(["left"]))

    def has_left(self, rank: int) -> dict[str, Any] | None:
        """How a rank left, or None."""
        key = f"left/{rank}"
        if not self._store.check([key]):
            return None
        try:
            found = json.loads(self._store.get(key))
        except ValueError:
            return None
        return found if isinstance(found, dict) and isinstance(found.get("counts"), dict) else None

    def dead(self, ranks: Sequence[int]) -> set[int]:
        """Which of these ranks, on this host, have no process any more."""
        self._learn_processes(self._store, ranks)
        return {rank for rank in ranks if rank in self._peers and self._peers[rank].is_dead()}

    def _learn_processes(self, store: Any, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._peers and store.check([f"process/{rank}"]):
                payload = store.get(f"process/{rank}")
                if len(payload) == PROCESS_ID_BYTES:
                    self._peers[rank] = ProcessId.unpack(payload)

    def last_known(self, rank: int, group: str) -> RankStatus:
        """What is known of a rank that is not asked."""
        return self._last_known_status(rank, group, bool(self.dead([rank])))

    def _last_known_status(self, rank: int, group: str, dead: bool) -> RankStatus:
        key, left = f"words/{rank}/{group}", self.has_left(rank)
        said = _unpack(self._store.get(key), rank) if self._store.check([key]) else RankStatus(rank)
        how, last = (str(left.get("how")), left.get("last")) if left is not None else (None, None)
        if last is None and self._store.check([f"position/{rank}"]):
            last = self._store.get(f"position/{rank}")[:_MAX_POSITION_BYTES].decode(errors="replace")
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

    # -- telling people -----------------------------------------------------------------------------------------------

    def teller(self, ranks: Sequence[int]) -> int:
        """Which rank prints the last verdict: the first of those that it concerns that is alive and comes to print.

        Waits for those before this one, and for the teller to have told, but never for long. Without the store each
        rank is on its own.
        """
        if self._lost:
            return self._rank
        key, deadline = f"teller/{self._verdicts}", time.monotonic() + _TELLING_SEC
        before = [rank for rank in ranks if rank < self._rank]
        try:
            while time.monotonic() < deadline and len(self.dead(before)) < len(before) and not self._store.check([key]):
                time.sleep(_POLL_SEC)
            first = int(self._store.compare_set(key, "", str(self._rank)))
            while first != self._rank and time.monotonic() < deadline + _LINGER_SEC and not self.dead([first]):
                if self._store.check([f"told/{self._verdicts}"]):
                    break
                time.sleep(_POLL_SEC)
            return first
        except STORE_ERRORS:
            return self._rank

    def has_told(self, first: int, ranks: Sequence[int]) -> None:
        """After printing. The teller leaves last where it serves the store, and first where torchrun watches: what it
        wrote then stands in torchrun's summary. Never waits for long."""
        if self._lost:
            return
        deadline = time.monotonic() + _LINGER_SEC
        try:
            self._store.set(f"heard/{self._verdicts}/{self._rank}", "1")
            if first != self._rank:
                while time.monotonic() < deadline and not self.dead([first]) and "TORCHELASTIC_RUN_ID" in os.environ:
                    time.sleep(_POLL_SEC)
                return
            self._store.set(f"told/{self._verdicts}", "1")
            while time.monotonic() < deadline:
                missing = [rank for rank in ranks if not self._store.check([f"heard/{self._verdicts}/{rank}"])]
                if len(self.dead(missing)) == len(missing):
                    return
                time.sleep(_POLL_SEC)
        except STORE_ERRORS:
            return

    def close(self) -> None:
        self._watchdog.stop()


class _Watchdog(threading.Thread):
    """Testifies while the main thread is busy elsewhere."""

    def __init__(self, inquiry: FailureAgreement, store: Any) -> None:
        super().__init__(name="ddpstats-guard", daemon=True)
        self._inquiry, self._stopped = inquiry, threading.Event()
        self._store = store

    def run(self) -> None:
        answered, told = -1, ""
        ranks = range(self._inquiry._world_size)
        while not self._stopped.wait(_WATCHDOG_SEC) and self._inquiry._is_reachable():
            try:
                self._inquiry._learn_processes(self._store, ranks)  # while there is somebody to ask
                position = self._inquiry._position()
                if position != told:
                    self._store.set(f"position/{self._inquiry._rank}", position)
                    told = position
                number = self._inquiry._verdicts
                alarm = None if answered == number else self._inquiry.alarm_in(self._store)
                if alarm is None:
                    continue
                key = f"testimony/{number}/{self._inquiry._rank}"
                if not self._store.check([key]):
                    self._store.set(key, _pack(self._inquiry._testify(alarm.group)))
                answered = number
            except STORE_ERRORS:
                return

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2 * _WATCHDOG_SEC + 1)


# -- on the wire ------------------------------------------------------------------------------------------------------


def _pack(testimony: RankStatus) -> str:
    return json.dumps(
        {
            "events": events_as_dicts(testimony.events),
            "balances": {str(seq): balance for seq, balance in testimony.balances.items()},
            "count": testimony.count,
            "waits_in": testimony.waits_in,
            "last": testimony.last,
            "left": testimony.left,
            "stack": testimony.stack,
        }
    )


def _unpack(payload: bytes, rank: int) -> RankStatus:
    """A rank whose testimony cannot be read has none."""
    try:
        if len(payload) > _MAX_BYTES:
            raise ValueError("too long")
        given = json.loads(payload)
        waits_in = given["waits_in"]
        return RankStatus(
            rank,
            tuple(events_from_dicts(given["events"])),
            {int(seq): int(balance) for seq, balance in given["balances"].items()},
            int(given["count"]),
            None if waits_in is None else (str(waits_in[0]), int(waits_in[1])),
            None if given["last"] is None else str(given["last"]),
            None if given["left"] is None else str(given["left"]),
            False,
            None if given["stack"] is None else str(given["stack"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return RankStatus(rank)


def _pack_finding(finding: GuardFinding) -> str:
    return json.dumps(
        {
            "kind": finding.kind,
            "message": finding.message,
            "group": finding.group,
            "seq": finding.seq,
            "missing": finding.missing,
            "culprits": finding.culprits,
            "doubts": finding.doubts,
            "by_rank": {str(rank): event.as_dict() for rank, event in finding.by_rank.items()},
        }
    )


def _unpack_finding(payload: bytes, alarm: Alarm) -> GuardFinding:
    """A verdict that cannot be read is one of which nothing is known."""
    try:
        given = json.loads(payload)
        return GuardFinding(
            str(given["kind"]),
            str(given["message"]),
            str(given["group"]),
            int(given["seq"]),
            tuple(map(int, given["missing"])),
            tuple(map(int, given["culprits"])),
            {int(rank): Event.from_dict(event) for rank, event in given["by_rank"].items()},
            tuple(map(int, given["doubts"])),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return unexplained(alarm.group, alarm.words, alarm.seq, alarm.until)
