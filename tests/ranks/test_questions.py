"""Several questions share one collective: answers come in order, and what a rank cannot ask is an error on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddpstats import any_rank, reduce_stats
from ddpstats._ranks import agreement
from ddpstats._ranks.step import ask_all
from ddpstats.errors import DdpstatsError, InvalidStats, RankMissing
from ddpstats.testing import ThreadGroup, run_threads


@dataclass
class Recorded:
    """A question, and what became of it."""

    numbers: Sequence[float] = (1.0,)
    cannot: Exception | None = None
    answers: Any = None
    log: list[Any] = field(default_factory=list)

    def _ask(self, step: int | None) -> Sequence[float]:
        if self.cannot is not None:
            raise self.cannot
        self.log.append(("asked", step))
        return self.numbers

    def _answer(self, sums: Sequence[float], group: Any) -> Any:
        self.log.append(("answered", list(sums)))
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers(group) if callable(self.answers) else sum(sums)

    def _drop(self) -> None:
        self.log.append("dropped")


def asked(group: ThreadGroup, name: str, questions: Sequence[Recorded], step: int | None = None) -> tuple[Any, Any]:
    """Return the answers or the error of `ask_all`, and the questions' logs."""
    answers: Any
    try:
        answers = ask_all(name, questions, step, group)
    except Exception as error:
        answers = error
    return answers, [question.log for question in questions]


def of_ranks(fn: Any, world_size: int = 3) -> list[Any]:
    return run_threads(fn, world_size).values()


@pytest.mark.parametrize("world_size", [1, 5])
def test_each_question_gets_its_own_sums(world_size: int) -> None:
    def run(group: ThreadGroup) -> Any:
        rank = float(group.rank)
        return asked(group, "two", [Recorded((rank, 2 * rank, 65535.0)), Recorded(), Recorded((rank * rank,))], 7)

    total = world_size * (world_size - 1) / 2
    squares = sum(rank * rank for rank in range(world_size))
    for answers, logs in of_ranks(run, world_size):
        assert answers == [3 * total + 65535 * world_size, world_size, squares]
        assert logs[0] == [("asked", 7), ("answered", [total, 2 * total, 65535.0 * world_size])]
        assert logs[1] == [("asked", 7), ("answered", [world_size])]


def test_numbers_that_earlier_calls_left_in_the_buffer_are_not_answers() -> None:
    def run(group: ThreadGroup) -> Any:
        for _ in range(3):
            reduce_stats({"a": float("inf"), "b": float("nan")}, group=group)
            answers, _ = asked(group, "q", [Recorded((0.0, 0.0, 0.0, 0.0, 0.0))])
        return answers, any_rank(False, group=group)

    assert of_ranks(run) == [([0.0], False)] * 3


def test_a_rank_that_cannot_ask_takes_part_and_all_raise_its_reason() -> None:
    def run(group: ThreadGroup) -> Any:
        cannot = ValueError("no gradients here") if group.rank == 1 else None
        first = asked(group, "q()", [Recorded(), Recorded(cannot=cannot), Recorded()])
        return first, asked(group, "q()", [Recorded()])

    outcomes = of_ranks(run)
    texts = {str(error) for (error, _), _ in outcomes}
    assert len(texts) == 1
    assert "q() cannot judge the step:\n  rank 1: ValueError: no gradients here\n" in texts.pop()
    for rank, ((error, logs), (again, _)) in enumerate(outcomes):
        assert isinstance(error, InvalidStats)
        assert isinstance(error.__cause__, ValueError) == (rank == 1)
        dropped = [("asked", None), "dropped"]
        assert logs == [dropped, [] if rank == 1 else dropped, dropped]
        assert again == [3.0]


def test_answers_may_communicate_and_come_in_order() -> None:
    def run(group: ThreadGroup) -> Any:
        names = [Recorded(answers=lambda group, n=n: reduce_stats({n: group.rank}, group=group).values) for n in "abc"]
        return asked(group, "q", names)[0]

    assert of_ranks(run) == [[{"a": 1.0}, {"b": 1.0}, {"c": 1.0}]] * 3


def test_after_an_answer_that_raises_the_others_are_dropped() -> None:
    def run(group: ThreadGroup) -> Any:
        return asked(group, "q", [Recorded(), Recorded(answers=DdpstatsError("found")), Recorded()])

    for error, (first, second, third) in of_ranks(run):
        assert str(error) == "found"
        assert [len(first), len(second), third[-1]] == [2, 2, "dropped"]
        assert "dropped" not in [*first, *second]


def test_a_rank_that_knows_of_a_missing_one_does_not_wait() -> None:
    def run(group: ThreadGroup) -> Any:
        return asked(group, "q", [Recorded(), Recorded(cannot=RankMissing("rank 1 is gone", missing_ranks=(1,)))])

    (error, (log, _)), *_ = of_ranks(run, 1)
    assert isinstance(error, RankMissing)
    assert log[-1] == "dropped"


def test_question_in_the_middle_of_another_call_is_refused_and_not_asked() -> None:
    def run(group: ThreadGroup) -> Any:
        question = Recorded()

        def handler(_: agreement.Agreement) -> Any:  # as a signal's, in the middle of a call
            return asked(group, "q", [question])

        return group.channel.run(handler, 10.0)[0], question.log

    for error, log in of_ranks(run, 1):
        assert "was asked for in the middle of another one" in str(error)
        assert log == []
