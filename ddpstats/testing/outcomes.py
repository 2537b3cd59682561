"""The answer of each rank: a value, its exception, or how its process ended.

RankError
+-- RankTimedOut      still running at the time limit; carries its Python stack
+-- RankDied          its process ended without an answer; carries the exit code and the end of its stderr
+-- RankUnpicklable   its return value or exception could not travel; carries the type, and why
+-- RanksFailed       some rank failed: one block per failed rank
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from traceback import format_exception
from typing import Any


class RankError(Exception):
    """Base of what `run_ranks` itself reports. An exception of the rank's own function comes back as it is."""


class RankTimedOut(RankError):
    """Raised when a rank still ran at the time limit and was killed. `stack` is where its threads were."""

    def __init__(self, rank: int, timeout_sec: float, stack: str) -> None:
        super().__init__(rank, timeout_sec, stack)
        self.rank, self.timeout_sec, self.stack = rank, timeout_sec, stack

    def __str__(self) -> str:
        where = self.stack or "(no Python stack: the rank did not answer SIGUSR1)"
        return f"rank {self.rank} still ran after {self.timeout_sec:g} s and was killed. It was here:\n{where}"


class RankDied(RankError):
    """Raised when a rank's process ended before it returned anything. `exit_code` is negative for a signal."""

    def __init__(self, rank: int, exit_code: int | None, stderr_tail: str) -> None:
        super().__init__(rank, exit_code, stderr_tail)
        self.rank, self.exit_code, self.stderr_tail = rank, exit_code, stderr_tail

    def __str__(self) -> str:
        tail = f"The end of its stderr:\n{self.stderr_tail}" if self.stderr_tail else "It wrote nothing to stderr."
        return f"rank {self.rank} died without an answer: {describe_exit(self.exit_code)}. {tail}"


class RankUnpicklable(RankError):
    """Raised in place of a return value or an exception that pickle cannot carry to the parent unchanged."""

    def __init__(self, rank: int, what: str, summary: str, reason: str) -> None:
        super().__init__(rank, what, summary, reason)
        self.rank, self.what, self.summary, self.reason = rank, what, summary, reason

    def __str__(self) -> str:
        return f"rank {self.rank}: the {self.what} {self.summary} could not be pickled:\n{self.reason}"


class RanksFailed(RankError):
    """Raised by `RankOutcomes.values` when some rank failed. `outcomes` holds every rank's."""

    def __init__(self, outcomes: RankOutcomes) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes

    def __str__(self) -> str:
        failed = [outcome for outcome in self.outcomes if not outcome.ok]
        texts = [bad.traceback or f"{type(bad.error).__name__}: {bad.error}" for bad in failed]
        blocks = [f"--- rank {bad.rank} ---\n{text.rstrip()}" for bad, text in zip(failed, texts, strict=True)]
        return "\n".join([f"{len(failed)} of {len(self.outcomes)} ranks failed", *blocks])


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """One rank's answer.

    `value` is what the function returned (None where it failed), `error` what it raised or a `RankError`,
    `traceback` the formatted traceback in the rank ("" if none), `exit_code` the process's exit code (negative for a
    signal; None while the process lives on in a pool).
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None

    @classmethod
    def of(cls, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> RankOutcome:
        """Call ``fn``. `SystemExit` and pytest's outcomes are errors as others are."""
        try:
            return cls(rank, fn(*args, **kwargs))
        except BaseException as error:
            return cls(rank, error=error, traceback="".join(format_exception(error)))

    @property
    def ok(self) -> bool:
        """Return whether the function returned and its value arrived."""
        return self.error is None


class RankOutcomes(tuple[RankOutcome, ...]):
    """Every rank's outcome, in rank order."""

    __slots__ = ()

    def values(self) -> list[Any]:
        """The returned values in rank order. Raises `RanksFailed` if any rank failed."""
        for outcome in self:
            if outcome.error is not None:
                raise RanksFailed(self) from outcome.error
        return [outcome.value for outcome in self]

    def errors(self) -> dict[int, BaseException]:
        """The error of each failed rank, by rank; empty when all returned."""
        return {outcome.rank: outcome.error for outcome in self if outcome.error is not None}


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words: `killed by SIGKILL (exit code -9)`."""
    if exit_code is None:
        return "still running"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name} (exit code {exit_code})"
    except ValueError:
        return f"killed by signal {-exit_code} (exit code {exit_code})"
