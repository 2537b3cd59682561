"""Several runs of one micro-batch: who is wrong?"""

from __future__ import annotations

import pytest

from ddpstats.sentinel._vote import Judgement, Run, judge


def judged(*runs: tuple[int, str]) -> Judgement:
    """(rank, result) of rank 0's micro-batch, in the order in which they were run."""
    return judge(0, [Run(rank, f"time {place}", result) for place, (rank, result) in enumerate(runs)], str.__eq__)


@pytest.mark.parametrize(
    ("runs", "culprits", "words"),
    [
        ([(0, "x"), (0, "a"), (1, "a"), (2, "a"), (1, "a")], (0,), "Rank 0 was wrong once and right once: a transient"),
        ([(0, "x"), (0, "x"), (1, "a"), (2, "a"), (1, "a")], (0,), "Rank 0 is wrong each time: a lasting fault"),
        ([(0, "a"), (0, "a"), (1, "x"), (2, "a"), (1, "x")], (1,), "Rank 1 is wrong each time"),
        ([(0, "a"), (0, "a"), (1, "a"), (2, "a"), (1, "x")], (1,), "Rank 1 was wrong once and right once"),
        ([(0, "x"), (0, "a"), (1, "a"), (1, "a")], (0,), "Rank 0 was wrong once and right once"),
        ([(0, "x"), (0, "a"), (0, "a")], (0,), "Rank 0 was wrong once and right once"),
        ([(0, "x"), (0, "y"), (1, "a"), (2, "a"), (1, "a")], (0,), "Rank 0 is wrong each time"),
    ],
    ids=["transient", "lasting", "peer", "peer once", "two ranks", "alone", "never the same"],
)
def test_what_two_ranks_agree_on_is_right(runs: list[tuple[int, str]], culprits: tuple[int, ...], words: str) -> None:
    found = judged(*runs)
    assert found.culprit_ranks == culprits
    assert words in found.text
    assert not found.is_noise


def test_two_ranks_that_each_repeat_themselves_are_not_told_apart() -> None:
    found = judged((0, "x"), (0, "x"), (1, "a"), (1, "a"))
    assert (found.culprit_ranks, found.is_noise) == ((), False)
    assert "a third rank would have to decide" in found.text
    assert "result A: rank 0 time 0, rank 0 time 1" in found.text


@pytest.mark.parametrize("runs", [[(0, "x"), (0, "y"), (1, "a"), (1, "b")], [(0, "x"), (0, "y"), (0, "z")]])
def test_runs_that_are_all_different_are_noise_and_nobodys_fault(runs: list[tuple[int, str]]) -> None:
    found = judged(*runs)
    assert (found.culprit_ranks, found.is_noise) == ((), True)
