"""Comparing what ranks post about their collectives: one by one (strict), or rolling digests now and then (step).

`_waits` waits for what others post, `_verdicts` says what a difference leads to, `_messages` compares messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ddpstats._transport.store import STORE_ERRORS, StoreSilent
from ddpstats.guard._events import MASK, Event, roll, same_labels
from ddpstats.guard._exchange import Note, Overrun, agree
from ddpstats.guard._messages import MessageComparing
from ddpstats.guard._session import Group, Session
from ddpstats.guard._spoken import words_of
from ddpstats.guard._verdicts import Silenced, Standing, Verdicts, alarm_of
from ddpstats.guard._waits import Waits

_END = Note(0x454E44, 0)  # posted in place of a collective by a rank that leaves


class Comparing:
    """Compares the collectives of one session. ``strict``: each one; otherwise rolling digests, now and then."""

    def __init__(self, session: Session, standing: Standing, *, strict: bool, warn: bool, timeout_sec: float) -> None:
        self.session, self._standing, self._strict = session, standing, strict
        self.verdicts = Verdicts(session, standing, warn)
        self.waits = Waits(self.verdicts, standing, timeout_sec)
        self.messages = MessageComparing(session, self.verdicts, self.waits)

    def foretell(self, group: Group, event: Event) -> None:
        """Say what is about to be issued, where the other ranks of this host see it even if gloo aborts this process.

        Raises where a neighbour in the group has said something else; never waits.
        """
        assert group.exchange is not None
        if group.exchange.tell(event.seq, event.digest, words_of(event)):
            self.verdicts.await_verdict(alarm_of(group, event.seq, doubt=True))

    # -- notes --------------------------------------------------------------------------------------------------------

    def _post(self, group: Group, number: int, note: Note, seq: int, ending: bool = False) -> None:
        """Post this rank's note of that number, about its collectives up to ``seq``; never waits."""
        assert group.exchange is not None
        try:
            group.exchange.post(number, note)
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(alarm_of(group, seq, until=True, ending=ending), error)

    def _notes(self, group: Group, number: int, seq: int, deadline: float) -> list[Note] | None:
        """All ranks' notes of that number; waits for them. None where they are gone, and a later one proves them.

        Raises `Silenced` where a warning has ended all comparing.
        """
        assert group.exchange is not None
        try:
            notes = group.exchange.look(number)
            if notes is None:
                with self._standing.waiting(group, seq):
                    notes = group.exchange.wait(number, self.waits.watch(group, seq, deadline))
            return notes
        except Overrun:
            return None
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(alarm_of(group, seq, until=True), error)

    def _is_there(self, group: Group, number: int) -> bool:
        """Whether all ranks have posted that note by now; never waits."""
        assert group.exchange is not None
        try:
            with self.verdicts.agreement.glancing():
                return group.exchange.look(number) is not None
        except Overrun:
            return True
        except StoreSilent:
            return False
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(alarm_of(group, group.seq, until=True), error)

    # -- strict: one by one -------------------------------------------------------------------------------------------

    def post(self, group: Group, event: Event) -> None:
        """Say what is about to be issued."""
        group.rolling = roll(group.rolling, event.digest)
        self._post(group, event.seq, Note(event.digest, event.balance, event.word, group.rolling), event.seq)

    def settle(self, group: Group, until: int) -> None:
        """See that all ranks posted the same, up to number ``until``. Waits for them."""
        deadline = self.waits.deadline()
        with group.lock:
            while group.settled < until and not self._standing.silent:
                if not self._settle_one(group, group.settled + 1, deadline):
                    return

    def _settle_one(self, group: Group, seq: int, deadline: float) -> bool:
        """False where a warning has ended all comparing."""
        try:
            notes = self._notes(group, seq, seq, deadline)
        except Silenced:
            return False
        group.settled = seq
        if notes is None:
            return True
        same = agree(notes)
        if same and same_labels(note.label for note in notes):
            group.agreed = seq
        else:
            self.verdicts.await_verdict(alarm_of(group, seq, doubt=same))  # labels may differ for good reasons
        return True

    def settle_what_is_ready(self) -> None:
        """Compare what all ranks have posted by now; never waits."""
        for group in list(self.session.named.values()):
            if group.exchange is not None and group.exchange.is_quick and group.lock.acquire(blocking=False):
                try:
                    while group.settled < group.seq and self._is_there(group, group.settled + 1):
                        self._settle_one(group, group.settled + 1, time.monotonic())
                finally:
                    group.lock.release()

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
        """Say what was issued so far; never waits."""
        group.checks += 1
        group.checked_at[group.checks] = group.seq
        note = Note(roll(group.rolling, group.seq), group.balance & MASK, group.labels)
        group.labels = 0  # each comparison has the labels since the one before: those that may differ do so once
        self._post(group, group.checks, note, group.seq, self.verdicts.ends_by is not None)

    def settle_checks(self, group: Group) -> None:
        """See that all ranks posted the same rolling digests. Waits for them."""
        with group.lock:
            while group.checks_settled < group.checks and not self._standing.silent:
                if not self._settle_check(group, group.checks_settled + 1):
                    return

    def _settle_check(self, group: Group, number: int) -> bool:
        """False where a warning has ended all comparing."""
        try:
            notes = self._notes(group, number, group.seq, self.waits.deadline())
        except Silenced:
            return False
        group.checks_settled = number
        if notes is None:
            return True
        if not agree(notes):
            self.verdicts.await_verdict(alarm_of(group, group.seq))
        elif any(note.label != notes[0].label for note in notes):
            self.verdicts.await_verdict(alarm_of(group, group.seq, doubt=True))  # legal, where one rank has no names
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
        groups = self.session.groups()
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
        for group in self.session.groups():
            if self._strict:
                end = _END._replace(rolling=group.rolling)
                self._post(group, group.seq + 1, end, group.seq + 1, self.verdicts.ends_by is not None)
                group.has_ended = True
            else:
                self.post_check(group)

    def finish(self) -> None:
        """The last comparison, after `post_ends`. A rank that left earlier, or runs one collective more, shows here."""
        for group in self.session.groups():
            if self._strict:
                self.settle(group, group.seq + 1)
            else:
                self.settle_checks(group)
        self.messages.await_receivers()

    @contextmanager
    def ending_within(self, seconds: float) -> Iterator[None]:
        """Around `post_ends` and `finish`: the program has come to its end, and ranks may do so at different times.

        Raises `Unfinished` where some rank does not come in time, has died, or has left before.
        """
        self.verdicts.ends_by = time.monotonic() + seconds
        try:
            yield
        finally:
            self.verdicts.ends_by = None
