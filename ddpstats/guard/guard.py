"""The guard: watches the collectives of this process and compares them with those of the other ranks.

What happens to a collective (`pipeline`):

1. It is described: signature, label, call site. All calls that are equal in these share one event; of each call, the
   ring has the number in its group and the time, and the record, if there is one, has it all. step (and what is
   asynchronous in strict): it is announced to the other ranks of this host in shared memory, and where a neighbour has
   announced another one, it is not issued.
2. strict: its note is posted. A blocking one waits for all ranks' notes, so that nothing moves before all agree; others
   are settled when the program waits for them, or at the next blocking one of their group.
   step: it is noted. At `step()` and every N collectives what was noted is rolled into a digest, and that is compared.
3. A blocking collective is waited for, in slices, between which the rank looks for alarms and for ranks that left.

What is left is compared (`_compare_last`) when the process group is destroyed, on leaving, and when a program ends that
did not enter the guard itself (`ending`).

`group` keeps what belongs to one life of the process group, `compare` compares, `verdicts` waits and comes to
verdicts.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from contextlib import ContextDecorator, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ddpstats._base import config
from ddpstats._base.config import check_choice, check_count
from ddpstats._base.lazy import breaks_graph
from ddpstats._base.text import count_of, first_line
from ddpstats._observe import collectives, groups
from ddpstats.errors import CollectiveMismatch, ConfigError, DdpstatsError
from ddpstats.guard.compare import StepQuestion
from ddpstats.guard.group import MODES, GuardMode, Settings, call_before_destroy, had_ranks, next_turn
from ddpstats.guard.pipeline import Watching
from ddpstats.guard.printing import NO_GROUP, TO_RUN, GuardCounters, errors_behind, in_short, last_line
from ddpstats.guard.verdicts import Unfinished, is_broken

MismatchPolicy = Literal["raise", "warn"]

_AFTER_ERROR_SEC = 5.0  # how long the ranks of a program that has failed here are waited for

log = logging.getLogger("ddpstats")


class collective_guard(ContextDecorator):  # used like `torch.no_grad`
    """Compare the collectives of this process with those of the other ranks, and name the first that differs.

    A context manager, and a decorator. Every rank must enter and leave it at the same point of its program; inside,
    ranks may do what they like as long as they issue the same collectives per group, in the same order.

    Args:
        mode: "strict": compared before a blocking collective moves data, asynchronous ones when they are waited for;
            "step": compared at each `step` and every ``check_every`` collectives of a group; "record": nothing is
            compared while running, each rank writes what it does to ``record_dir``; "off": nothing is done at all.
        on_mismatch: "raise", or "warn": the error's text as a warning of the logger "ddpstats", and no more comparing.
        infer_labels: look in the calling frames for the key under which the program reached the tensor.
        check_every: collectives of one group between two comparisons; mode "step" only.
        timeout_sec: how long a collective may wait for other ranks; None: DDPSTATS_TIMEOUT_SEC, or the timeout that the
            program has given the process group. Where the group's or the call's own timeout is shorter, that holds, and
            ends the wait with torch's own error.
        record_dir: write each rank's collectives there, as JSON lines for ``ddpstats report``; any mode but "off".

    Raises:
        CollectiveMismatch: on every rank, from the collective at which it was noticed, from `step` or on leaving.
        RankMissing: on every living rank: a rank died, left, or did not come within the timeout.
        ConfigError: an argument, or a torch whose collectives this version cannot observe; on this rank only.

    Limits: a guard that is entered while another is active does nothing, and says so once. A collective that C++ waits
    for (DDP, functional collectives) is settled at the next one of its group, at `step` or on leaving.

    Example::

        with ddpstats.collective_guard("strict"):
            train()      # rank 0: all_reduce(stats["snr"])   rank 1: all_reduce(stats["l1"])
        # both: CollectiveMismatch: ... rank 0: all_reduce(float32[], sum) 'snr' at train.py:12 in train ...
    """

    def __init__(
        self,
        mode: GuardMode = "step",
        *,
        on_mismatch: MismatchPolicy = "raise",
        infer_labels: bool = True,
        check_every: int = 64,
        timeout_sec: float | None = None,
        record_dir: str | Path | None = None,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("on_mismatch", on_mismatch, get_args(MismatchPolicy))
        check_count("check_every", check_every, 1)
        if mode == "record" and record_dir is None:
            raise ConfigError("mode='record' needs record_dir=, where the records are written")
        self.mode, self._timeout_sec = mode, config.timeout_sec(timeout_sec)
        warn, has_timeout = on_mismatch == "warn", config.has_timeout(timeout_sec)
        self._settings = Settings(mode, warn, infer_labels, check_every, self._timeout_sec, has_timeout, record_dir)
        self._idle_entries = 0  # while another guard was active, or this one
        self._reset()

    def _reset(self) -> None:
        self._watching = Watching(self._settings)
        self._found_late: DdpstatsError | None = None  # by the last comparison

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not entered: one guard watches all collectives of a process."""
        return {**vars(self), "_idle_entries": 0, "_watching": None, "_found_late": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> collective_guard:
        if self.mode == "off":
            return self
        if _active:
            self._idle_entries += 1
            outer = f"a collective_guard of mode {_active[0].mode!r}"
            _log_once(logging.WARNING, f"{outer} is active: this one does nothing.")
            return self
        self._reset()
        _check_reduce_ops()
        next_turn()
        collectives.subscribe(self._watching)
        self._watching.recording.subscribe()
        call_before_destroy(self._at_destroy)
        _active.append(self)
        try:
            if dist.is_initialized():
                self._watching.begin()
        except BaseException:  # a store that cannot do what is needed, or does not answer
            self._shut()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._idle_entries:
            self._idle_entries -= 1
            return
        if self not in _active:
            return
        cause: DdpstatsError | None = None
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # the usual end of a script
        try:
            if error is None:
                self._compare_last(None)
            else:
                cause = self._explain(error)
            self._watching.leave(error)
        finally:
            self._shut()
            self.say_end()
        if cause is not None:
            raise cause from error

    def _explain(self, error: BaseException) -> DdpstatsError | None:
        """Return the verdict that explains what the program has raised, if there is one."""
        state, comparing = self._watching.state, self._watching.comparing
        if comparing is None or state.is_raised or any(group.is_given_up for group in comparing.session.named.values()):
            return None
        behind = errors_behind(error)
        if comparing.verdicts.passed_on in behind or not any(map(is_broken, behind)):
            return None
        return state.verdict or comparing.verdicts.explain(self._watching.ring.last())

    def _compare_last(self, error: BaseException | None, at_end: bool = False) -> None:
        """Make the last comparison of this process group, if that is possible, and was not done. Raises what it finds.

        ``error``: what the program itself ends with. ``at_end``: the program destroys its process group, or has come to
        its own end. There ranks may come here at different times, and some never: where the comparison cannot go to its
        end in time, the last line of the guard says so. Otherwise every rank is to come.
        """
        comparing, state = self._watching.comparing, self._watching.state
        if comparing is None or state.silent or state.is_raised:
            return
        self._found_late = state.verdict
        state.raise_verdict()
        session = comparing.session
        if session.is_concluded or not session.is_reachable():
            return
        session.is_concluded = True
        if at_end:
            within_sec = self._timeout_sec if error is None else _AFTER_ERROR_SEC
            comparing.verdicts.ends_by = time.monotonic() + within_sec
        try:
            self._watching.leave(error, compares=True)
            comparing.settle_all()
            comparing.agreement.say_done()
        except Unfinished as reason:
            session.unfinished = str(reason)
        except DdpstatsError as found:
            self._found_late = found
            raise
        except (RuntimeError, OSError) as reason:
            session.unfinished = f"the store does not answer ({first_line(reason)[:200]})"

    def verdict_at_end(self, error: BaseException | None) -> DdpstatsError | None:
        """Compare where the program has ended, by ``error`` or without. Return what was found, then or before."""
        if isinstance(error, KeyboardInterrupt):
            return None
        cause = None if error is None else self._explain(error)
        if cause is None:
            with suppress(DdpstatsError):
                self._compare_last(error, at_end=True)
        return cause or self._found_late

    def _at_destroy(self, group: Any) -> None:
        if group is not dist.group.WORLD:
            return
        next_turn()
        self._watching.recording.begin_early()
        if not self.has_begun or self._watching.is_over():
            return
        error = sys.exc_info()[1]
        try:
            self._compare_last(error, at_end=True)
        except DdpstatsError as found:
            # An exit handler may have called, whose errors are not caught: `ending` reports what was found.
            if threading.main_thread().is_alive() and (error is None or isinstance(found, CollectiveMismatch)):
                raise

    @property
    def has_begun(self) -> bool:
        """Return whether there was a process group."""
        return self._watching.session is not None

    @property
    def verdict(self) -> DdpstatsError | None:
        """Return what was raised as the guard's finding; it stays here where the program has caught it."""
        return self._watching.state.verdict

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave without a last comparison; local, and raises nothing of the other ranks'. Idempotent."""
        if self in _active:
            try:
                self._watching.leave(error)
            finally:
                self._shut()

    def _shut(self) -> None:
        collectives.unsubscribe(self._watching)
        call_before_destroy(None)
        _active.remove(self)
        self._watching.close()

    # -- the user's side ----------------------------------------------------------------------------------------------

    @breaks_graph
    def step(self) -> None:
        """Mark a step boundary; in mode "step" compare all groups. Every rank must call. Raises as the guard does."""
        state, comparing = self._watching.state, self._watching.comparing
        state.steps += 1
        state.raise_verdict()
        if comparing is not None and not state.silent and not self._watching.is_over():
            comparing.step()

    def _question(self) -> StepQuestion:
        """`step` as one of several questions that all ranks ask together."""
        watching = self._watching
        return StepQuestion(None if watching.is_over() else watching.comparing, watching.state)

    @property
    def counters(self) -> GuardCounters:
        """Return what this guard has seen so far; a frozen copy."""
        state, tally = self._watching.state, self._watching.tally()
        seen, reasons = state.collectives, tally.not_compared
        left = seen - tally.compared
        return GuardCounters(seen, tally.compared, left, state.steps, self.mode, reasons, len(tally.agreeing))

    def last_line(self) -> tuple[int, str] | None:
        """Return (level, text) of the line that the guard ends with; None on all ranks but rank 0."""
        session, state = self._watching.session, self._watching.state
        if (str(session.rank) if session is not None else os.environ.get("RANK", "0")) != "0":
            return None
        verdict = "" if state.verdict is None else in_short(state.verdict)
        verdict = "a mismatch that was warned of" if state.silent else verdict
        is_amiss, line = last_line(self.counters, self._explain_nothing(), verdict)
        if state.warnings:
            line = f"{line} {count_of(state.warnings, 'warnings of names that differ')}, which are not compared again."
        return logging.WARNING if is_amiss else logging.INFO, line

    def say_end(self) -> None:
        """Log the last line; of guards with nothing to compare the first alone, for there may be one at each step."""
        last = self.last_line()
        if last is not None and last[0] == logging.WARNING:
            _log_once(*last)
        elif last is not None:
            log.log(last[0], "%s", last[1])

    def _explain_nothing(self) -> str:
        """Return why there was nothing to compare, where that is known."""
        session = self._watching.session
        if session is None:
            return "" if had_ranks() else NO_GROUP
        is_alone = self._settings.compares and session.agreement is None
        return f"the program runs on one rank. {TO_RUN}" if is_alone else ""


def _check_reduce_ops() -> None:
    """Raise `ConfigError` where operators do not name their reduce op, which could not be compared then."""
    if dist.is_available() and not groups.operators_name_reduce_op:
        raise ConfigError(
            f"the guard needs torch 2.10 or newer, and this is torch {torch.__version__}: its collectives do not name "
            "their reduce op, so ranks that reduce by different ones would seem to agree. Install a newer torch, or "
            "run without the guard; the rest of ddpstats works with this one."
        )


_active: list[collective_guard] = []


@functools.cache
def _log_once(level: int, text: str) -> None:
    log.log(level, "%s", text)


def _in_fork() -> None:
    """Forget the active guards: what they write to is the other process's, which goes on."""
    for guard in _active:
        guard._watching.disown()
        guard._reset()
    _active.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
