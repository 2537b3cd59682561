"""Comparing point-to-point messages, between the two ranks they concern, before they are taken."""

from __future__ import annotations

import time
from typing import Any

from ddpstats._observe import collectives
from ddpstats._ranks.store import STORE_ERRORS, StoreSilent
from ddpstats.guard.event import Event
from ddpstats.guard.failure_agreement import Alarm
from ddpstats.guard.group import Group, Session
from ddpstats.guard.messages import Awaited, unmatched
from ddpstats.guard.status import GuardFinding
from ddpstats.guard.verdicts import Silenced, Verdicts, is_broken

_RECEIVERS_SEC = 1.0  # a receiver that takes from anybody never looks at a note


class MessageComparing:
    """Compares the messages of one session."""

    def __init__(self, session: Session, verdicts: Verdicts) -> None:
        self._session, self._verdicts = session, verdicts

    def post(self, group: Group, event: Event) -> None:
        """Say what is about to be sent; never waits."""
        assert group.messages is not None
        with self._verdicts.answered(_alarm_of(group, event)):
            group.messages.sent(event)

    def settle(self, group: Group, awaited: Awaited) -> None:
        """Compare a message with what its receiver expects, before it is taken."""
        assert group.messages is not None
        deadline, alarm = self._verdicts.deadline(group), _alarm_of(group, awaited.event)

        def watch() -> None:
            self._verdicts.poll_alarm()
            if time.monotonic() > deadline or self._is_dead(awaited.source):
                self._verdicts.publish(self._unmatched(awaited.event, group), alarm)
                raise Silenced

        try:
            found = group.messages.compare(awaited, watch)
        except Silenced:
            return
        except STORE_ERRORS as error:
            self._verdicts.conclude_alone(alarm, error)
        if found is None:
            group.received_well += 1
        else:
            self._verdicts.publish(found, alarm)

    def wait_for(self, work: Any, group: Group, event: Event) -> None:
        """Wait until a message was sent, or has come."""
        try:
            collectives.wait_once(work, group.timeout_sec)
            return
        except RuntimeError as error:
            if not is_broken(error):
                raise
            broken = error
        # Not in the handler: what the backend says of it, a timeout of its own, would stand first in the traceback.
        alarm = _alarm_of(group, event)
        with self._verdicts.answered(alarm):
            self._verdicts.publish(self._unmatched(event, group), alarm)
        raise broken

    def await_receivers(self) -> None:
        """Let who receives this rank's last messages find them wrong while this rank can still be told."""
        groups = list(self._session.named.values())
        senders = [group.messages for group in groups if group.messages is not None]
        deadline = time.monotonic() + _RECEIVERS_SEC
        while time.monotonic() < deadline and any(messages.unread() for messages in senders):
            self._verdicts.poll_alarm()
            time.sleep(0.005)
        for group in groups:
            group.unread = 0 if group.messages is None else group.messages.unread()
        if senders:
            self._verdicts.poll_alarm()

    def _is_dead(self, rank: int) -> bool:
        try:
            with self._verdicts.agreement.glancing():
                return bool(self._verdicts.agreement.dead([rank]))
        except StoreSilent:
            return False

    def _unmatched(self, event: Event, group: Group) -> GuardFinding:
        messages = group.messages
        with self._verdicts.agreement.asking():
            last = None if messages is None or event.peer is None else messages.last_from(event.peer)
            peer = None if event.peer is None else self._verdicts.agreement.last_known(event.peer, group.name)
        return unmatched(event, group.view.rank, group.words, last, peer)


def _alarm_of(group: Group, event: Event) -> Alarm:
    peers = () if event.peer is None else (event.peer,)
    return Alarm(event.group, group.words, (*peers, group.view.rank), event.seq, True)
