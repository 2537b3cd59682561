"""How one rank comes to the verdict that all ranks come to, and what it does then: raise it, log it, or go on.

Whatever is found goes through `_failure_agreement`, and is the same error on every rank.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from ddpstats._base.rank_names import ranks_text
from ddpstats._transport.store import STORE_ERRORS
from ddpstats.errors import CollectiveMismatch, DdpstatsError, RankMissing
from ddpstats.guard._events import Event
from ddpstats.guard._failure_agreement import MESSAGES, Alarm, FailureAgreement
from ddpstats.guard._session import Group, Session
from ddpstats.guard._status import DOUBT, MISMATCH, MISSING, NOTHING, GuardFinding
from ddpstats.guard._summary import Tally
from ddpstats.guard._telling import printed_once, signal_deferred

_WAITS_IN = ("ddpstats.", "torch._", "torch.autograd", "torch.distributed", "torch.nn.parallel", "torch.ops")
_BROKEN = re.compile(r"connection (closed|reset)|timed out|broken pipe", re.IGNORECASE)

log = logging.getLogger("ddpstats")


@dataclass
class Standing:
    """How far a guard has come, over all its sessions."""

    verdict: DdpstatsError | None = None
    silent: bool = False  # a mismatch was warned of: nothing is compared any more
    waits: dict[int, tuple[str, int]] = field(default_factory=dict)  # thread -> the (group, number) that it waits in
    collectives: int = 0
    steps: int = 0
    past: Tally = field(default_factory=Tally)  # of sessions that are over

    def waits_in(self, name: str) -> tuple[str, int] | None:
        """Where some thread of this rank waits: in the group of that name, if one does there."""
        waits = list(self.waits.values())
        return next((place for place in waits if place[0] == name), waits[0] if waits else None)

    @contextmanager
    def waiting(self, group: Group, seq: int) -> Iterator[None]:
        thread = threading.get_ident()
        self.waits[thread] = group.name, seq
        try:
            yield
        finally:
            self.waits.pop(thread, None)


class Silenced(Exception):  # no error: a way out
    """A mismatch was warned of, so nothing is waited for any more."""


class Unfinished(Exception):  # no error: a way out
    """The last comparison cannot go to its end; the text says why."""


class Verdicts:
    """Those of one session. ``warn``: a mismatch is logged, and nothing is compared any more."""

    def __init__(self, session: Session, standing: Standing, warn: bool) -> None:
        self._session, self._standing, self._warn = session, standing, warn
        self.ends_by: float | None = None  # the program has ended: until when others are waited for

    @property
    def agreement(self) -> FailureAgreement:
        assert self._session.agreement is not None
        return self._session.agreement

    def poll_alarm(self) -> None:
        """Take part in an alarm that is on. Raises `Silenced` where its verdict ends all comparing."""
        alarm = self.agreement.alarm()
        if alarm is not None:
            self.await_verdict(alarm)
            if self._standing.silent:
                raise Silenced

    def await_verdict(self, alarm: Alarm) -> None:
        """Come to the verdict that all ranks come to; raise or log it."""
        with signal_deferred():
            self._raise_or_warn(self.agreement.raise_alarm(alarm), alarm)

    def publish(self, finding: GuardFinding, alarm: Alarm) -> None:
        """A verdict that this rank can give alone."""
        self._raise_or_warn(self.agreement.declare(finding, alarm), alarm)

    @contextmanager
    def answered(self, alarm: Alarm) -> Iterator[None]:
        """Around what the store must answer at once."""
        try:
            yield
        except DdpstatsError:
            raise
        except STORE_ERRORS as error:
            self.conclude_alone(alarm, error)

    def conclude_alone(self, alarm: Alarm, error: BaseException) -> NoReturn:
        """The store does not answer."""
        self._raise_or_warn(self.agreement.without_store(alarm, error), alarm)
        raise AssertionError("a missing rank is always raised")

    def explain(self, last: Event | None, group: Group | None = None) -> DdpstatsError | None:
        """A wait failed: who is missing, and why? None where nothing can be said. ``last``: this rank's last event."""
        group = group or (self._session.named.get(last.group.removesuffix(MESSAGES)) if last is not None else None)
        if group is None:
            return None
        alarm = self.agreement.alarm() or alarm_of(group, group.seq, until=True, doubt=True)
        try:
            self.await_verdict(alarm)
        except DdpstatsError as found:
            return found
        return None

    def _raise_or_warn(self, finding: GuardFinding, alarm: Alarm) -> None:
        if finding.kind in (NOTHING, DOUBT):
            return
        error = _error_of(finding, alarm)
        self._session.note(finding.group, finding.seq, finding.kind == MISMATCH)
        if self._warn and isinstance(error, CollectiveMismatch):
            self._standing.silent = True
            log.warning("%s", error)
            return
        if alarm.ending and self.ends_by is not None and finding.kind == MISSING:
            raise Unfinished(
                f"{ranks_text(finding.missing)} had ended without a last comparison (killed, or in an error)"
            )
        self._standing.verdict = error
        printed_once(error, self.agreement, alarm.ranks)
        raise error


def alarm_of(group: Group, seq: int, until: bool = False, doubt: bool = False, ending: bool = False) -> Alarm:
    return Alarm(group.name, group.words, group.view.ranks, seq, until, doubt, ending)


def is_broken(error: BaseException) -> bool:
    """Whether this is how a backend says that another rank is gone, or late, in a wait that torch itself does."""
    if not isinstance(error, RuntimeError) or not _BROKEN.search(str(error)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(_WAITS_IN)


def _error_of(finding: GuardFinding, alarm: Alarm) -> DdpstatsError:
    if finding.kind == MISMATCH:
        return CollectiveMismatch(
            finding.message,
            group=alarm.words,
            seq=finding.seq,
            by_rank=finding.by_rank,
            culprit_ranks=finding.culprits,
            missing_ranks=finding.missing,
        )
    return RankMissing(finding.message, missing_ranks=finding.missing, group=alarm.words)
