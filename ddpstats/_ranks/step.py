"""Questions that several parts of a program ask of all ranks in one step, and decisions of all ranks: one collective.

1. Each `Question` says, as a few numbers, what this rank has to report. They are chosen so that their sums over ranks
   prove that nothing is wrong: flags, whose sum is how many ranks say so, and digests, whose sums prove agreement.
2. The numbers of all questions lie side by side on lanes of the group's buffer: one all_reduce.
3. Each question gets its own sums, which are the same on every rank, and does what follows: nothing, or its own
   collectives. They answer one after the other, in one order on every rank, so these collectives match.

A rank that cannot ask takes part all the same, and every rank raises what it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ddpstats._base import config
from ddpstats._base.lazy import breaks_graph
from ddpstats._ranks.agreement import Agreement
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.exchange import ASK, Call, Failure, failure_of
from ddpstats.errors import InvalidStats, RankMissing


@breaks_graph
def any_rank(flag: Any, *, group: Any = None) -> bool:
    """Return whether ``flag`` is true on some rank; the same answer on every rank. Collective, one all_reduce.

    For decisions that must be taken in lockstep, such as "skip this step". Without a process group: ``bool(flag)``.
    Raises `InvalidStats` on every rank where some rank's flag has no truth value; `ProtocolMismatch` and `RankMissing`
    as `StatsReducer` does.

    Example::

        rank 0: any_rank(False)   rank 1: any_rank(True)   both: True
    """
    return _count_ranks("any_rank", flag, group)[0] > 0


@breaks_graph
def all_ranks(flag: Any, *, group: Any = None) -> bool:
    """Return whether ``flag`` is true on every rank; the same answer on every rank. Collective, like `any_rank`."""
    count, world_size = _count_ranks("all_ranks", flag, group)
    return count == world_size


def _count_ranks(kind: str, flag: Any, group: Any) -> tuple[float, int]:
    """Return how many ranks' flags are set, and how many ranks there are. ``kind``: the name of the public function."""
    answer: list[float] | Failure
    try:
        answer = [float(bool(flag))]
    except Exception as error:  # this rank must still take part
        answer = Failure("", f"the flag of {kind}() has no truth value: {error}")

    def work(agreement: Agreement) -> tuple[float, int]:
        return agreement.ask(Call(kind, None, ""), answer)[0], agreement.world_size

    return channel_of(group).run(work, config.timeout_sec(None))


class Question(Protocol):
    """One part's question. `_ask` and `_answer` alternate; where a step has no answer, `_drop` takes its place."""

    def _ask(self, step: int | None) -> Sequence[float]:
        """Return this rank's numbers, as many on every rank; finite, and small enough that their sums are exact. Local.

        Whatever it raises, other than `RankMissing`, every rank raises as `InvalidStats`.
        """

    def _answer(self, sums: Sequence[float], group: Any) -> Any:
        """Do what follows from the sums. Every rank calls it, and may issue collectives on ``group``."""

    def _drop(self) -> None:
        """Let go of what `_ask` has seen: the step has no answer. Local."""


def ask_all(
    name: str, questions: Sequence[Question], step: int | None, group: Any, timeout_sec: float | None = None
) -> list[Any]:
    """Return the answer to each question. Collective: one all_reduce, and what the answers themselves need.

    Args:
        name: the call in words, the same on all ranks: which questions there are.
        step: the caller's number of the step; None where each question counts by itself.
        timeout_sec: of the all_reduce; None: DDPSTATS_TIMEOUT_SEC, or 300.

    Raises:
        InvalidStats: some rank could not ask; on every rank. Alone, a process raises the error itself.
        ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`; ranks that ask other questions are among the first.
        Exception: what an answer raises. Questions after it get none.
    """
    channel = channel_of(group)
    channel.refuse_inside()  # before anything is looked at: the step under way is still to be answered
    asked: deque[Question] = deque()
    try:
        numbers, cause = _collect(questions, step, asked)
        if cause is not None and len(channel.ranks) == 1:
            raise cause
        flat = [number for own in numbers for number in own]
        report = flat if cause is None else failure_of(cause)

        def work(agreement: Agreement) -> list[float]:
            return agreement.ask(Call(ASK, name, ""), report)

        try:
            sums = iter(channel.run(work, config.timeout_sec(timeout_sec)))
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


def _collect(
    questions: Sequence[Question], step: int | None, asked: deque[Question]
) -> tuple[list[Sequence[float]], Exception | None]:
    """Return the numbers of all questions, and the first error. All are asked: ranks let go of the same things."""
    numbers, cause = [], None
    for question in questions:
        try:
            numbers.append(question._ask(step))
            asked.append(question)
        except RankMissing:  # there is no rank to wait for
            raise
        except Exception as error:
            cause = cause or error
    return numbers, cause
