"""Comparing what ranks post about their collectives: one by one (strict), or rolling digests now and then (step).

`verdicts` waits for what others post, and says what a difference leads to; `messages` compares messages.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ddpstats._ranks.gather import gather_trees
from ddpstats._ranks.store import STORE_ERRORS, StoreSilent
from ddpstats.errors import CollectiveMismatch, DdpstatsError
from ddpstats.guard.encoding import encode
from ddpstats.guard.event import MASK, Event, roll, same_labels
from ddpstats.guard.failure_agreement import Alarm
from ddpstats.guard.group import FindLimit, Group, Session, Settings, Standing
from ddpstats.guard.messages import Messages
from ddpstats.guard.notes import Note, Overrun
from ddpstats.guard.notes_shm import agree, share
from ddpstats.guard.verdicts import GivenUp, Silenced, Verdicts, alarm_of

_MAX_PENDING = 64
_END = Note(0x454E44, 0)  # posted in place of a collective by a rank that leaves


Told = dict[str, list[Any]]
"""A group -> its name, words and ranks, the number of the last collective, and the note about all until then."""


class _Digests(NamedTuple):
    """The digest of all that a rank has done in a group up to the collective of number ``seq``."""

    seq: int
    note: Note


class Comparing:
    """Compares the collectives of one session."""

    def __init__(self, session: Session, standing: Standing, settings: Settings) -> None:
        self.session, self._standing, self._strict = session, standing, settings.mode == "strict"
        self.verdicts = Verdicts(session, standing, settings)
        self.agreement = self.verdicts.agreement
        self.messages = Messages(standing, self.verdicts)
        self._asked: list[tuple[Group, _Digests]] = []

    def foretell(self, group: Group, event: Event, seq: int) -> None:
        """Say what is about to be issued, where the other ranks of this host see it even if gloo aborts this process.

        Raises where a neighbour in the group has said something else; never waits.
        """
        assert group.exchange is not None
        if group.exchange.tell(seq, event.digest, encode(event)):
            with suppress(GivenUp):
                self.verdicts.differ(group, seq, tentative=True)

    # -- notes --------------------------------------------------------------------------------------------------------

    def post(self, group: Group, event: Event, seq: int) -> None:
        """strict: say what is about to be issued."""
        group.rolling = roll(group.rolling, event.digest)
        note = Note(event.digest, event.balance, event.word, group.rolling)
        self._post(group, seq, note, seq)

    def take_in(self, group: Group, event: Event, check_every: int) -> None:
        """step: note what is about to be issued, and compare the digests now and then."""
        assert group.exchange is not None
        group.pending.append(event)
        if group.settled < group.posted and (group.exchange.is_quick or group.seq % 8 == 0):
            self._settle_ready(group)
        if group.seq % check_every == 0:
            self._post_digests(group)  # settled when all have posted it, and at `step` at the latest
        elif len(group.pending) >= _MAX_PENDING:
            _roll_pending(group)

    def _post_digests(self, group: Group) -> None:
        seq, note = _digests_of(group)
        group.checked_at[group.posted + 1] = seq
        self._post(group, group.posted + 1, note, seq)

    def _post(self, group: Group, number: int, note: Note, seq: int) -> None:
        """Post this rank's note of that number, about its collectives up to ``seq``; never waits."""
        assert group.exchange is not None
        group.posted = number
        try:
            group.exchange.post(number, note)
        except STORE_ERRORS as error:
            ending = self.verdicts.ends_by is not None
            self.verdicts.conclude_alone(alarm_of(group, seq, overdue=True, ending=ending), error)

    def settle(self, group: Group, until: int, find_limit: FindLimit | None = None) -> bool:
        """See that all ranks posted the same, up to that note. Waits for them, for no longer than the call would.

        True where the program's own timeout has ended that wait.
        """
        with group.lock:
            while group.settled < until and not self._standing.silent and self._settle_one(group, find_limit):
                pass
        return group.is_given_up

    def settle_what_is_ready(self) -> None:
        """Compare what all ranks have posted by now; never waits."""
        for group in list(self.session.named.values()):
            if group.settled < group.posted and group.exchange is not None and group.exchange.is_quick:
                self._settle_ready(group)

    def _settle_ready(self, group: Group) -> None:
        if group.lock.acquire(blocking=False):
            try:
                while group.settled < group.posted and self._is_there(group, group.settled + 1):
                    if not self._settle_one(group):
                        break
            finally:
                group.lock.release()

    def _is_there(self, group: Group, number: int) -> bool:
        """Return whether all ranks have posted that note by now."""
        assert group.exchange is not None
        try:
            with self.verdicts.agreement.glancing():
                return group.exchange.look(number) is not None
        except Overrun:
            return True
        except StoreSilent:
            return False
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(alarm_of(group, group.seq, overdue=True), error)

    def _settle_one(self, group: Group, find_limit: FindLimit | None = None) -> bool:
        """Compare the next note with those of all ranks. False where nothing more is compared."""
        assert group.exchange is not None
        number = group.settled + 1
        if self._strict and group.exchange.all_alike(number):
            group.settled = group.agreed = number
            return True
        seq = number if self._strict else group.seq
        try:
            notes = group.exchange.look(number)
            if notes is None:
                limit = (find_limit or group.limit)()
                watch = self.verdicts.watch(group, seq, time.monotonic() + limit.seconds, is_own=limit.is_own)
                with self._standing.waiting(group, seq):
                    notes = group.exchange.wait(number, watch)
        except Overrun:  # a later note proves this one
            group.settled = number
            return True
        except GivenUp:
            self.verdicts.give_up(group)
            return False
        except Silenced:
            return False
        except DdpstatsError:
            raise
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(alarm_of(group, seq, overdue=True), error)
        group.settled = number
        try:
            if self._strict:
                self._judge_one(group, seq, notes)
            else:
                self._judge_digests(group, number, notes)
        except GivenUp:
            return False
        return True

    def _judge_one(self, group: Group, seq: int, notes: Sequence[Note]) -> None:
        same = agree(notes)
        if same and same_labels(note.label for note in notes):
            group.agreed = seq
        else:
            self.verdicts.differ(group, seq, tentative=same)  # labels may differ for good reasons

    def _judge_digests(self, group: Group, number: int, notes: Sequence[Note]) -> None:
        if not agree(notes):
            self.verdicts.differ(group, group.seq)
        elif any(note.label != notes[0].label for note in notes):
            self.verdicts.differ(group, group.seq, tentative=True)  # legal, where one rank has no names
        group.agreed = max(group.agreed, group.checked_at.get(number, 0))
        for old in [old for old in group.checked_at if old <= number]:
            del group.checked_at[old]

    # -- at a step and at the end -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compare all groups as far as they are."""
        groups = self.session.groups()
        for group in groups if not self._strict else ():
            self._post_digests(group)
        for group in groups:
            self.settle(group, group.posted)

    def ask(self) -> int:
        """`step` by a sum over all ranks: what this one adds to it. It is 0 modulo 2**64 if all agree. Never waits.

        Raises where what was posted before is seen to differ.
        """
        groups = self.session.groups()
        for group in groups:
            self._settle_ready(group)
        self._asked = [(group, _digests_of(group, strict=self._strict)) for group in groups]
        return sum(_share(group, digests) for group, digests in self._asked if digests.seq > group.proved) & MASK

    def told(self) -> Told:
        """Return what was asked, in full."""
        return {
            f"{group.name} of {group.view.ranks}": [group.name, group.words, list(group.view.ranks), seq, *note]
            for group, (seq, note) in self._asked
        }

    def take_agreed(self) -> None:
        """All ranks had asked the same, so what was posted before is there, too."""
        asked, self._asked = self._asked, []
        for group, digests in asked:
            self.settle(group, group.posted)
            group.agreed, group.proved = max(group.agreed, digests.seq), digests.seq

    def post_ends(self) -> None:
        """Say that nothing more will come; never waits."""
        self.verdicts.has_ended = True
        for group in self.session.groups():
            if self._strict:
                self._post(group, group.seq + 1, _END._replace(rolling=group.rolling), group.seq + 1)
                group.has_ended = True
            else:
                self._post_digests(group)

    def finish(self) -> None:
        """The last comparison, after `post_ends`. A rank that left earlier, or runs one collective more, shows here."""
        for group in self.session.groups():
            self.settle(group, group.posted)

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


def _roll_pending(group: Group) -> None:
    with suppress(IndexError):  # there are no more, or another thread has taken the last
        while True:
            event = group.pending.popleft()
            group.rolling = roll(group.rolling, event.digest)
            group.labels = roll(group.labels, event.word)
            group.balance += event.balance


def _digests_of(group: Group, strict: bool = False) -> _Digests:
    _roll_pending(group)
    rolling = roll(group.rolling, group.seq)
    if strict:  # where labels and balances are compared one by one
        return _Digests(group.seq, Note(rolling))
    note = Note(rolling, group.balance & MASK, group.labels)
    group.labels = 0  # each comparison has the labels since the one before: those that may differ do so once
    return _Digests(group.seq, note)


def _share(group: Group, digests: _Digests) -> int:
    ranks = group.view.ranks
    return share(group.name, ranks.index(group.view.rank), len(ranks), digests.note)


def alarms_of(told: Iterable[Told]) -> list[Alarm]:
    """Return what ranks that tell this are to come to a verdict on. Pure: the same, and in one order, on every rank."""
    entries: dict[str, list[list[Any]]] = {}
    for one in told:
        for group, entry in one.items():
            entries.setdefault(group, []).append(entry)
    alarms = []
    for _, held in sorted(entries.items()):
        name, words, ranks = held[0][:3]
        notes = [Note(*entry[4:]) for entry in held]
        same = len(held) == len(ranks) and agree(notes)
        if not same or len({note.label for note in notes}) > 1:
            alarms.append(
                Alarm(name, words, tuple(ranks), max(entry[3] for entry in held), overdue=False, tentative=same)
            )
    return alarms


# -- a step as a question that all ranks ask in one collective ---------------------------------------------------------
#
# 1. Each rank sends its share of a sum over all ranks, modulo 2**64, which is 0 if in every group all have done the
#    same (`notes_shm.share`); and whether it knows of a mismatch already. A sum of float64 is exact for whole numbers,
#    so the share travels as four of 16 bits.
# 2. 0, and no rank knows of anything: compared.
# 3. Otherwise every rank sends what it has done in each group, as digests. All see in which groups ranks differ, and
#    come to the verdict on these, also where they are no members.

_CHUNKS = struct.Struct("<4H")
_BITS = 16


class StepQuestion:
    """The question of one step. ``comparing`` is None where there is nothing to compare, or nobody to compare with."""

    def __init__(self, comparing: Comparing | None, standing: Standing) -> None:
        self._comparing, self._standing = comparing, standing
        self._known: CollectiveMismatch | None = None

    def _ask(self, step: int | None) -> Sequence[float]:
        self._standing.steps += 1
        share = 0
        try:
            if self._standing.verdict is not None:
                raise self._standing.verdict.with_traceback(None)
            if self._comparing is not None and not self._standing.silent:
                share = self._comparing.ask()
        except CollectiveMismatch as error:  # the others are to hear of it
            self._known = error
        return float(self._known is not None), *map(float, _chunks(share))

    def _answer(self, sums: Sequence[float], group: Any) -> None:
        known, *chunks = sums
        if known or _joined(chunks):
            self._settle(group)
        if self._comparing is not None and not self._standing.silent:
            self._comparing.take_agreed()

    def _drop(self) -> None:
        """Nothing is kept: digests go on from where they are."""

    def _settle(self, group: Any) -> None:
        """Some rank differs, or knows of a mismatch. Collective."""
        comparing = self._comparing
        mine: Told = {} if comparing is None else comparing.told()
        tree = {"error": str(self._known or ""), "silent": self._standing.silent, "groups": mine}
        told = gather_trees(tree, name="collective_guard.step: what each rank did", group=group)
        if self._known is not None:
            raise self._known
        errors = [one["error"] for one in told if one["error"]]
        if comparing is not None and (errors or any(one["silent"] for one in told)):
            comparing.verdicts.catch_up()
        if errors:
            raise CollectiveMismatch(errors[0])
        self._standing.silent |= any(one["silent"] for one in told)
        for alarm in alarms_of(one["groups"] for one in told):
            if comparing is not None and not self._standing.silent:
                comparing.verdicts.await_verdict(alarm)


def _chunks(number: int) -> tuple[int, ...]:
    return _CHUNKS.unpack(number.to_bytes(_CHUNKS.size, "little"))


def _joined(sums: Sequence[float]) -> int:
    """Return the sum of what `_chunks` took apart, modulo 2**64."""
    total = sum(int(chunk) << _BITS * place for place, chunk in enumerate(sums))
    return total % (1 << _BITS * len(sums))
