"""A thread of each rank that answers for it: it reports the rank's status while the main thread is busy elsewhere.

It looks a few times a second. A look that comes much too late tells that no thread of Python's ran: the process
was stopped, its host had no time for it, or one call held the GIL. The other ranks cannot know that, and see one more
rank that waits.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddpstats._ranks.store import STORE_ERRORS, StoreSilent

if TYPE_CHECKING:
    from ddpstats.guard.failure_agreement import FailureAgreement

WATCHDOG_SEC = 0.25
_ASLEEP_SEC = 1.0  # a busy machine lets a thread wait for less
_ASKING_SEC = 2.0  # of all answers of the store in one look
_LOOKING_SEC = 3.0  # of a look, where threads of Python run
_LATELY_SEC = 5.0  # from the end of a sleep: for as long as others may be about to judge


class Watchdog(threading.Thread):
    """Reports this rank's status while the main thread is busy elsewhere."""

    def __init__(
        self,
        agreement: FailureAgreement,
        position: Callable[[], str],
        is_reachable: Callable[[], bool],
    ) -> None:
        super().__init__(name="ddpstats-guard", daemon=True)
        self._agreement, self._stopped = agreement, threading.Event()
        self._position, self._is_reachable = position, is_reachable
        self._due = math.inf  # when the next look is to come, or this one to be over
        self._slept_sec, self._woke = 0.0, -math.inf
        self._told, self._answered = "", -1  # the last position, and the last verdict that a status was for

    def run(self) -> None:
        try:
            while self._is_time() and self._is_reachable():
                with contextlib.suppress(StoreSilent), self._agreement.store.within(_ASKING_SEC):
                    self._look()
        except STORE_ERRORS:
            pass
        finally:
            self._due = math.inf

    def _look(self) -> None:
        agreement, store = self._agreement, self._agreement.store
        agreement.roster.learn()  # while there is somebody to ask
        position = self._position()
        if position != self._told:
            store.set(f"position/{agreement.rank}", position)
            self._told = position
        number = agreement.verdicts
        alarm = None if self._answered == number else agreement.alarm()
        if alarm is None:
            return
        if not store.check([f"status/{number}/{agreement.rank}"]):
            agreement.report_status(number, alarm)
        self._answered = number

    def _is_time(self) -> bool:
        """Wait for the next look; False where there is none any more."""
        self.slept_sec()  # in the look that is over
        self._due = time.monotonic() + self._agreement.look_sec
        has_ended = self._stopped.wait(self._agreement.look_sec)
        self.slept_sec()
        self._due = time.monotonic() + _LOOKING_SEC
        return not has_ended

    def slept_sec(self) -> float:
        """How long this process ran no Python lately. Another thread may ask before this one has come to look."""
        now = time.monotonic()
        late_sec = now - self._due
        if late_sec > _ASLEEP_SEC:
            self._slept_sec, self._woke = late_sec, now
        return self._slept_sec if now < self._woke + _LATELY_SEC else 0.0

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2 * WATCHDOG_SEC + 1)
