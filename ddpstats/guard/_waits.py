"""Waiting for other ranks, with a deadline and in slices.

In between, a rank looks for alarms that others raised, and for ranks that died or left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats._observe import collectives
from ddpstats._transport.store import STORE_ERRORS, StoreSilent
from ddpstats.errors import DdpstatsError
from ddpstats.guard._events import Event
from ddpstats.guard._session import Group
from ddpstats.guard._telling import gave_up
from ddpstats.guard._verdicts import Silenced, Standing, Unfinished, Verdicts, alarm_of, is_broken

_SLICE_SEC = 0.2


class Waits:
    """Those of one session. Each is over after ``timeout_sec``."""

    def __init__(self, verdicts: Verdicts, standing: Standing, timeout_sec: float) -> None:
        self._verdicts, self._standing, self.timeout_sec = verdicts, standing, timeout_sec

    def deadline(self) -> float:
        """Of a wait that begins now."""
        return time.monotonic() + self.timeout_sec

    def wait_for(self, work: Any, group: Group, event: Event) -> None:
        """Wait for a collective that was issued, looking up between slices."""
        try:
            if collectives.wait_within(work, _SLICE_SEC):
                return
            watch = self.watch(group, event.seq, self.deadline() - _SLICE_SEC, waited_for=event)
            with self._standing.waiting(group, event.seq):
                while not collectives.wait_within(work, _SLICE_SEC):
                    watch()
        except Silenced:
            return  # the caller waits on, as without a guard
        except DdpstatsError:
            gave_up(work, group.view.group())
            raise
        except RuntimeError as error:
            found = self._verdicts.explain(event, group) if is_broken(error) else None
            if found is None:
                raise
            raise found from error

    def watch(self, group: Group, seq: int, deadline: float, waited_for: Event | None = None) -> Callable[[], None]:
        """What a rank does now and then while it waits for ``seq``: look for alarms, and for ranks that cannot come.

        ``waited_for``: what it waits for was issued without being compared, so the waiting ranks compare it now.
        """

        def watch() -> None:
            try:
                look()
            except StoreSilent:
                pass  # the collective may still go on; and if not, the deadline comes
            except STORE_ERRORS as error:
                self._verdicts.conclude_alone(alarm_of(group, seq, until=True), error)

        def look() -> None:
            self._verdicts.poll_alarm()
            ends_by = self._verdicts.ends_by
            if ends_by is not None and time.monotonic() > ends_by:
                raise _late(group)
            if time.monotonic() > deadline or self._cannot_come(group, seq):
                self._verdicts.await_verdict(alarm_of(group, seq, until=True, ending=ends_by is not None))
                raise Silenced
            if waited_for is not None and self._waits_elsewhere(waited_for, group):
                self._verdicts.await_verdict(alarm_of(group, seq))
                raise Silenced

        return watch

    def _cannot_come(self, group: Group, seq: int) -> bool:
        """Whether a rank that this one waits for has died, or left before this collective."""
        agreement = self._verdicts.agreement
        others = [rank for rank in group.view.ranks if rank != group.view.rank]
        gone = {}
        with agreement.glancing():
            if agreement.someone_left():
                gone = {rank: left for rank in others if (left := agreement.has_left(rank)) is not None}
            if any(left.get("counts", {}).get(group.name, 0) < seq for left in gone.values()):
                return True
            return bool(agreement.dead([rank for rank in others if rank not in gone]))

    def _waits_elsewhere(self, event: Event, group: Group) -> bool:
        with self._verdicts.agreement.glancing():
            return self._verdicts.agreement.another_waits_elsewhere(event, group.view.ranks)


def _late(group: Group) -> Unfinished:
    assert group.exchange is not None
    number = max(group.settled, group.checks_settled) + 1
    late = [group.view.ranks[index] for index in group.exchange.absent(number)]
    who = ranks_text(late) if late else "some rank"
    return Unfinished(f"{who} had not come to the end of the program in time")
