"""Compares what ranks post about their collectives: one by one (strict), or rolling digests now and then (step).

`verdicts` waits for what others post, and says what a difference leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from ddpstats._ranks.gather import gather_trees
from ddpstats._ranks.store import STORE_ERRORS
from ddpstats.errors import CollectiveMismatch, DdpstatsError
from ddpstats.guard.diagnosis import Alarm
from ddpstats.guard.event import MASK, Event, roll, same_labels
from ddpstats.guard.group import Group, GuardState, Limit, Session, Settings
from ddpstats.guard.notes import Note, Overrun, agree, share
from ddpstats.guard.verdicts import GivenUp, Silenced, Verdicts

_END = 0x454E44  # rolled in place of a collective by a rank that leaves
_SHARES = 1 << 36  # shares of a step's question are added up modulo this: float64 sums of 2**17 ranks are exact

# What this rank has asked about one group: its last number there, and its note.
Asked = tuple[Group, int, Note]
# Of all that a rank has done in a group: the group's name, words and ranks, the last number, and the note.
Digests = list[Any]


class Comparing:
    """Compares the collectives of one session."""

    def __init__(self, session: Session, state: GuardState, settings: Settings) -> None:
        self.session, self._state, self._strict = session, state, settings.mode == "strict"
        self.verdicts = Verdicts(session, state, settings)
        self.agreement = self.verdicts.agreement

    def stop_before(self, group: Group, seq: int) -> None:
        """Come to the verdict on a collective of which a neighbour in the group has announced another one."""
        with suppress(GivenUp):
            self.verdicts.differ(group, seq, tentative=True)

    # -- notes --------------------------------------------------------------------------------------------------------

    def post(self, group: Group, event: Event, seq: int) -> None:
        """strict: say what is about to be issued."""
        group.rolling = roll(group.rolling, event.digest)
        self._post(group, seq, Note(group.rolling, event.balance, event.word))

    def take_in(self, group: Group, event: Event, check_every: int) -> None:
        """step: note what is about to be issued, and compare the digests now and then."""
        assert group.exchange is not None
        group.rolling = roll(group.rolling, event.digest)
        group.labels = roll(group.labels, event.word)
        group.balance += event.balance
        if group.settled < group.posted and (group.exchange.is_quick or group.seq % 8 == 0):
            self.settle(group, group.posted)
        if group.seq % check_every == 0:
            self._post_digests(group)  # settled when all have posted it, and at `step` at the latest

    def _post_digests(self, group: Group) -> None:
        note, group.noted = _take_digests(group), group.seq
        self._post(group, group.posted + 1, note)

    def _post(self, group: Group, number: int, note: Note) -> None:
        """Post this rank's note of that number; never waits."""
        assert group.exchange is not None
        group.posted = number
        try:
            group.exchange.post(number, note)
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(group, number if self._strict else group.seq, error)

    def settle(self, group: Group, until: int, find_limit: Callable[[], Limit] | None = None) -> bool:
        """Compare what all ranks have posted, up to that note.

        Waits for them, for no longer than the limit; without one it never waits. True where the program's own timeout
        has ended that wait.
        """
        if group.lock.acquire(blocking=find_limit is not None):
            try:
                while group.settled < until and not self._state.silent and self._settle_one(group, find_limit):
                    pass
            finally:
                group.lock.release()
        return group.is_given_up

    def settle_all(self) -> None:
        """Compare all that this rank has posted; waits for the others."""
        for group in self.session.groups():
            self.settle(group, group.posted, group.limit)

    def _settle_one(self, group: Group, find_limit: Callable[[], Limit] | None) -> bool:
        """Compare the next note with those of all ranks. False where it is not there, or nothing more is compared."""
        assert group.exchange is not None
        number = group.settled + 1
        seq = number if self._strict else group.seq  # of the last collective that the note is about
        try:
            notes = group.exchange.look(number, spins=find_limit is not None)
            if notes is None:
                if find_limit is None:
                    return False
                watch = self.verdicts.watch(group, seq, find_limit(), group.newest, number)
                with self._state.note_wait(group, seq):
                    notes = group.exchange.wait(number, watch)
            group.settled = number
            self._judge(group, seq, notes)
        except Overrun:  # a later note proves this one
            group.settled = number
        except GivenUp:
            self.verdicts.give_up(group)
            return False
        except Silenced:
            return False
        except DdpstatsError:
            raise
        except STORE_ERRORS as error:
            self.verdicts.conclude_alone(group, seq, error)
            return False
        return True

    def _judge(self, group: Group, seq: int, notes: Sequence[Note]) -> None:
        if notes.count(notes[0]) < len(notes) or notes[0].balance:
            is_same, labels = agree(notes), {note.label for note in notes}
            if not is_same or not (same_labels(labels) if self._strict else len(labels) == 1):
                self.verdicts.differ(group, seq, tentative=is_same)  # labels may differ for good reasons
        if self._state.silent:
            return
        if self._strict:
            group.agreed = seq
        elif group.settled == group.posted:
            group.agreed = max(group.agreed, group.noted)

    # -- at a step and at the end -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compare all groups as far as they are."""
        for group in self.session.groups() if not self._strict else ():
            self._post_digests(group)
        self.settle_all()

    def ask(self, asked: list[Asked]) -> int:
        """`step` by a sum over all ranks: what this one adds to it. It is 0 modulo 2**64 if all agree. Never waits.

        Appends to ``asked``. Raises where what was posted before is seen to differ.
        """
        total = 0
        for group in self.session.groups():
            self.settle(group, group.posted)
            note, ranks = _take_digests(group), group.view.ranks
            asked.append((group, group.seq, note))
            if group.seq > group.proved:
                total += share(group.name, ranks.index(group.view.rank), len(ranks), note)
        return total & MASK

    def take_agreed(self, asked: list[Asked]) -> None:
        """All ranks had asked the same, so what was posted before is there, too."""
        for group, seq, _ in asked:
            self.settle(group, group.posted, group.limit)
            group.agreed, group.proved = max(group.agreed, seq), seq

    def post_ends(self) -> None:
        """Say that nothing more will come; never waits."""
        self.verdicts.has_ended = True
        for group in self.session.groups():
            if self._strict:
                self._post(group, group.seq + 1, Note(roll(group.rolling, _END)))
                group.has_ended = True
            else:
                self._post_digests(group)


def _take_digests(group: Group) -> Note:
    """Return the digest of all that this rank did, with the labels since the comparison before."""
    labels, group.labels = group.labels, 0
    return Note(roll(group.rolling, group.seq), group.balance & MASK, labels)


def alarms_of(reports: Iterable[Iterable[Digests]]) -> list[Alarm]:
    """Return what ranks that report this are to come to a verdict on. Pure: the same, in one order, on every rank."""
    by_group: dict[tuple[str, tuple[int, ...]], list[Digests]] = {}
    for digests in chain.from_iterable(reports):
        by_group.setdefault((digests[0], tuple(digests[2])), []).append(digests)
    alarms = []
    for (name, ranks), held in sorted(by_group.items()):
        notes = [Note(*note) for _, _, _, _, *note in held]
        is_same = len(held) == len(ranks) and agree(notes)
        if not is_same or len({note.label for note in notes}) > 1:
            seq = max(digests[3] for digests in held)
            alarms.append(Alarm(name, held[0][1], ranks, seq, overdue=False, tentative=is_same))
    return alarms


# -- a step as a question that all ranks ask in one collective ---------------------------------------------------------
#
# 1. Each rank sends its share of a sum over all ranks which is 0 if in every group all have done the same
#    (`notes.share`), modulo 2**36: a difference goes unseen once in as many; and whether it knows of a mismatch.
# 2. 0, and no rank knows of anything: compared.
# 3. Otherwise every rank sends what it has done in each group, as digests. All see in which groups ranks differ, and
#    come to the verdict on these, also where they are no members.


class StepQuestion:
    """The question of one step. ``comparing`` is None where there is nothing to compare, or no rank to compare with."""

    def __init__(self, comparing: Comparing | None, state: GuardState) -> None:
        self._comparing, self._state = comparing, state
        self._known: CollectiveMismatch | None = None
        self._asked: list[Asked] = []

    def _ask(self, step: int | None) -> Sequence[float]:
        self._state.steps += 1
        share = 0
        try:
            self._state.raise_verdict()
            if self._comparing is not None and not self._state.silent:
                share = self._comparing.ask(self._asked)
        except CollectiveMismatch as error:  # the others are to know of it
            self._known = error
        return float(self._known is not None), float(share % _SHARES)

    def _answer(self, sums: Sequence[float], group: Any) -> None:
        known, shares = sums
        if known or shares % _SHARES:
            self._settle(group)
        if self._comparing is not None and not self._state.silent:
            self._comparing.take_agreed(self._asked)

    def _drop(self) -> None:
        """Leave the labels that were asked about to the next comparison; all other digests go on anyway."""
        for group, _, note in self._asked:
            group.labels = group.labels or note.label

    def _settle(self, group: Any) -> None:
        """Some rank differs, or knows of a mismatch. Collective."""
        comparing = self._comparing
        asked = [[group.name, group.words, list(group.view.ranks), seq, *note] for group, seq, note in self._asked]
        error = {} if self._known is None else _as_tree(self._known)
        tree = {"error": error, "silent": self._state.silent, "groups": asked}
        reports = gather_trees(tree, name="collective_guard.step: what each rank did", group=group)
        if self._known is not None:
            raise self._known
        errors = [report["error"] for report in reports if report["error"]]
        is_silent = any(report["silent"] for report in reports)
        if comparing is not None and (errors or is_silent):
            comparing.verdicts.catch_up()
        if errors:
            by_rank = {rank: Event.from_dict(event) for rank, event in errors[0]["by_rank"].items()}
            raise CollectiveMismatch(**{**errors[0], "by_rank": by_rank})
        self._state.silent |= is_silent
        for alarm in alarms_of(report["groups"] for report in reports):
            if comparing is not None and not self._state.silent:
                comparing.verdicts.await_verdict(alarm)


def _as_tree(error: CollectiveMismatch) -> dict[str, Any]:
    """Return the arguments of an error that says the same on another rank; their events as dicts."""
    fields = {name: getattr(error, name) for name in ("group", "seq", "culprit_ranks", "missing_ranks")}
    by_rank = {rank: event.as_dict() for rank, event in error.by_rank.items()}
    return {"message": str(error), "by_rank": by_rank, **fields}
