"""Compares messages between two ranks, for the guard of a program that runs.

The n-th send and the n-th receive of two ranks and one tag belong together (`MessageNumbers`).

1. As a message begins, ranks of one host leave a word for it in shared memory: what is in it. Whoever comes later sees
   before anything moves that the other rank's word is another one. The store is not asked.
2. Where the wait for a message fails, both ranks report their last messages, and `diagnosis` finds what is wrong.
"""

from __future__ import annotations

from typing import Any

from ddpstats._observe import collectives
from ddpstats.guard.event import MESSAGES, Event, stable_hash
from ddpstats.guard.failure_agreement import Alarm
from ddpstats.guard.group import Group, Standing
from ddpstats.guard.status import message_place
from ddpstats.guard.verdicts import Verdicts, add_note, is_broken


class Messages:
    """The messages of one session."""

    def __init__(self, standing: Standing, verdicts: Verdicts) -> None:
        self._standing, self._verdicts = standing, verdicts

    def begin(self, group: Group, event: Event) -> None:
        """Leave a word for a message that is about to begin; never waits. Raises where the other rank's is another."""
        exchange, peer, number = group.exchange, event.peer, event.seq
        if exchange is None or peer is None or not number:
            return
        rank = group.view.rank
        sender, receiver = (rank, peer) if event.signature.op == "send" else (peer, rank)
        key = stable_hash(f"{sender} {receiver} {event.tag} {number}") or 1
        content = stable_hash(f"{event.signature.sizes} {event.signature.dtypes}")
        if exchange.announce_message(group.view.ranks.index(peer), key, content):
            self._verdicts.await_verdict(_alarm_of(group, event, is_overdue=False))

    def wait_for(self, work: Any, group: Group, event: Event) -> None:
        """Wait until a message was sent, or has come."""
        with self._standing.waiting(group, message_place(event), MESSAGES):
            try:
                collectives.wait_once(work, group.limit().seconds)
                return
            except RuntimeError as error:
                if not is_broken(error):
                    raise
                is_in_question = self._verdicts.agreement.alarm() is not None
                if not is_in_question and self._verdicts.is_own_timeout(error, group, group.limit()):
                    add_note(error, f"{event} was not completed in time{event.at}.")
                    self._verdicts.passed_on = error
                    raise
                broken = error
            # Not in the handler: the backend's own timeout would stand first in the traceback.
            self._verdicts.await_verdict(_alarm_of(group, event, is_overdue=True))
        raise broken


def _alarm_of(group: Group, event: Event, is_overdue: bool) -> Alarm:
    ranks = {group.view.rank, group.view.rank if event.peer is None else event.peer}
    return Alarm(
        event.group, group.words, tuple(sorted(ranks)), event.seq, overdue=is_overdue, tentative=not is_overdue
    )
