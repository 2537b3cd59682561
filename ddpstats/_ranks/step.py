"""What several parts of a program ask of all ranks in one step, in one collective.

1. Each `Question` says, as a few numbers, what this rank has to tell. They are chosen so that their sums over ranks
   prove that nothing is wrong: flags, whose sum is how many ranks say so, and digests, whose sums prove agreement.
2. The numbers of all questions stand side by side on lanes of the group's buffer: one all_reduce.
3. Each question hears its own sums, which are the same on every rank, and does what follows: nothing, or its own
   collectives. They answer one after the other, in one order on every rank, so these collectives meet.

A rank that cannot ask takes part all the same, and every rank raises what it says.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ddpstats._base import config
from ddpstats._ranks.agreement import Agreement, Call, Counters
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.comm import patience_sec
from ddpstats._ranks.status import ASK, Failure
from ddpstats.errors import InvalidStats, RankMissing


class Question(Protocol):
    """One part's. `_ask` and `_answer` alternate; where a step does not come to its answer, `_drop` takes its place."""

    def _ask(self, step: int | None) -> Sequence[float]:
        """This rank's numbers, as many on every rank; finite, and small enough that their sums are exact. Local.

        Whatever it raises, other than `RankMissing`, every rank raises as `InvalidStats`.
        """

    def _answer(self, sums: Sequence[float], group: Any) -> Any:
        """What follows from the sums of these numbers. Every rank calls it, and may issue collectives on ``group``."""

    def _drop(self) -> None:
        """The step comes to no answer: let go of what `_ask` has seen. Local."""


def ask_all(
    name: str, questions: Sequence[Question], step: int | None, group: Any, timeout_sec: float | None = None
) -> list[Any]:
    """The answer to each question. Collective: one all_reduce, and what the answers themselves need.

    Args:
        name: the call in words, with all that ranks must have alike: which questions there are.
        step: the caller's number of the step; None where each question counts by itself.
        timeout_sec: of the all_reduce; None: DDPSTATS_TIMEOUT_SEC, else 300.

    Raises:
        InvalidStats: some rank could not ask; on every rank. Alone, a process raises the error itself.
        ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`; ranks that ask other questions are among the first.
        Exception: what an answer raises. Questions after it get none.
    """
    channel = channel_of(group)
    channel.refuse_inside()  # before anything is looked at: the step under way is still to be answered
    asked: deque[Question] = deque()
    try:
        numbers, cause = _asked(questions, step, asked)
        if cause is not None and len(channel.ranks) == 1:
            raise cause
        told = numbers if cause is None else Failure("", f"{type(cause).__name__}: {cause}")
        timeout_sec = config.timeout_sec(timeout_sec)
        call = _call(name, timeout_sec)

        def work(agreement: Agreement) -> list[float]:
            return agreement.ask(call, told, Counters())

        try:
            sums = iter(channel.run(work, timeout_sec))
        except InvalidStats as error:
            raise error from cause
        answers = []
        for question, own in zip(questions, [[next(sums) for _ in own] for own in numbers], strict=True):
            asked.popleft()
            answers.append(question._answer(own, group))
        return answers
    finally:
        for question in asked:
            question._drop()


def _asked(
    questions: Sequence[Question], step: int | None, asked: deque[Question]
) -> tuple[list[Sequence[float]], Exception | None]:
    """The numbers of all questions, and the first error. All are asked: ranks are alike in what they let go of."""
    numbers, cause = [], None
    for question in questions:
        try:
            numbers.append(question._ask(step))
            asked.append(question)
        except RankMissing:  # there is nobody to wait for
            raise
        except Exception as error:
            cause = cause or error
    return numbers, cause


@functools.lru_cache(maxsize=64)
def _call(name: str, timeout_sec: float) -> Call:
    return Call(ASK, name, "", patience_sec(timeout_sec))
