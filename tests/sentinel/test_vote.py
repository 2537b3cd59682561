"""Repetitions of a micro-batch are judged: as noise, another step, or a fault of the rank that differs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.sentinel.peer_replay import ReplayJudgement, Run, judge, measure_noise

LIMIT = 1e-2


def offer(distance: float | None, *, repeats: bool = False) -> dict[str, Any]:
    return {} if distance is None else {"distance": distance, "repeats": repeats}


def test_no_noise_is_measured_where_no_rank_could_measure() -> None:
    assert measure_noise({0: offer(None), 1: offer(None)}, LIMIT, compiled=False) == (None, "")


def test_bits_are_compared_where_most_ranks_repeat_themselves() -> None:
    offers = {0: offer(0.0), 1: offer(0.5, repeats=True), 2: offer(0.0), 3: offer(None)}
    assert measure_noise(offers, LIMIT, compiled=False) == (0.0, "")


def test_noise_of_most_ranks_is_measured() -> None:
    room, text = measure_noise({0: offer(1e-6), 1: offer(2e-6)}, LIMIT, compiled=False)
    assert room == 8 * 2e-6
    assert "differ by up to 2.0e-06 of the largest one" in text
    assert "with room for 1.6e-05" in text
    assert measure_noise({0: offer(1e-6, repeats=True)}, LIMIT, compiled=False)[0] == 8 * 1e-6
    assert measure_noise({0: offer(5e-3)}, LIMIT, compiled=False)[0] == LIMIT


@pytest.mark.parametrize(
    ("distance", "repeats", "words"),
    [
        (1e-3, True, "norms differ by up to 1.0e-03 of the largest"),
        (2e-16, True, "norms differ by up to 2.0e-16 of the largest"),
        (0.5, False, "norms differ by up to 5.0e-01 of the largest"),
        (math.inf, False, "norms differ by up to inf"),
    ],
)
def test_a_replay_unlike_the_step_is_an_error_of_replay_fn(distance: float, repeats: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"not the step that was trained[\s\S]*{words}"):
        measure_noise({0: offer(distance, repeats=repeats), 1: offer(distance, repeats=repeats)}, LIMIT, compiled=False)


@pytest.mark.parametrize(
    "distances",
    [[0.0, 2e-7], [0.0, 8e-3, 0.0], [0.0, 2e-2, 0.0], [0.0, 2e-7, 0.5, 0.0], [3e-7, 2e-7, 0.5], [None, 2e-7], [1e-3]],
    ids=["one of two", "at most", "beyond", "one is wrong", "most round", "the others have nothing", "one rank"],
)
def test_in_a_compiled_program_what_may_be_rounding_is_neither_noise_nor_another_step(
    distances: list[float | None],
) -> None:
    offers = {rank: offer(distance, repeats=True) for rank, distance in enumerate(distances)}
    assert measure_noise(offers, LIMIT, compiled=True) == (0.0, "")


def test_in_a_compiled_program_what_most_ranks_repeat_beyond_rounding_is_another_step() -> None:
    with pytest.raises(ConfigError, match="not the step that was trained"):
        measure_noise({0: offer(2e-2, repeats=True), 1: offer(3e-2, repeats=True)}, LIMIT, compiled=True)


def judged(*runs: tuple[int, str]) -> ReplayJudgement:
    """(rank, result) of rank 0's micro-batch, in the order in which they were run."""
    return judge(0, [Run(rank, f"time {index}", result) for index, (rank, result) in enumerate(runs)], str.__eq__)


def test_two_ranks_that_each_repeat_themselves_have_no_culprit() -> None:
    judgement = judged((0, "x"), (0, "x"), (1, "a"), (1, "a"))
    assert (judgement.culprit_ranks, judgement.is_noise) == ((), False)
    assert "A third rank is needed to decide" in judgement.text
    assert "result A: rank 0 time 0, rank 0 time 1" in judgement.text


@pytest.mark.parametrize("runs", [[(0, "x"), (0, "y"), (1, "a"), (1, "b")], [(0, "x"), (0, "y"), (0, "z")]])
def test_runs_that_are_all_different_are_noise(runs: list[tuple[int, str]]) -> None:
    judgement = judged(*runs)
    assert (judgement.culprit_ranks, judgement.is_noise) == ((), True)


NEAR = 0.25  # what is taken for rounding in the table
CASES = {
    # The step, again on its rank, on the next one before and again, on the third one: who is wrong, and if compiled?
    "the same": ((1.0, 1.0, 1.0, 1.0, 1.0), (), ()),
    "the step alone, nearby": ((1.1, 1.0, 1.0, 1.0, 1.0), (0,), ()),
    "the step alone, far": ((9.0, 1.0, 1.0, 1.0, 1.0), (0,), (0,)),
    "its rank, nearby": ((1.1, 1.1, 1.0, 1.0, 1.0), (0,), ()),
    "its rank, far": ((9.0, 9.0, 1.0, 1.0, 1.0), (0,), (0,)),
    "its rank in two ways, nearby": ((1.1, 1.2, 1.0, 1.0, 1.0), (0,), ()),
    "its rank in two ways, far": ((9.0, 1.2, 1.0, 1.0, 1.0), (0,), (0,)),
    "the next one, nearby": ((1.0, 1.0, 1.1, 1.1, 1.0), (1,), ()),
    "the next one, far": ((1.0, 1.0, 9.0, 9.0, 1.0), (1,), (1,)),
    "the next one once, nearby": ((1.0, 1.0, 1.1, 1.0, 1.0), (1,), ()),
    "the next one once, far": ((1.0, 1.0, 9.0, 1.0, 1.0), (1,), (1,)),
    "all otherwise, nearby": ((1.1, 1.0, 1.2, 1.2, 1.15), (), ()),
    "all otherwise, far": ((9.0, 1.0, 1.2, 1.2, 1.1), (), (0,)),
    "all otherwise": ((9.0, 1.0, 3.0, 3.0, 5.0), (), ()),
}


@pytest.mark.parametrize(("results", "culprits", "if_compiled"), CASES.values(), ids=CASES.keys())
def test_the_table_of_cases(
    results: tuple[float, ...], culprits: tuple[int, ...], if_compiled: tuple[int, ...]
) -> None:
    step, again, before, on_next, third = results
    runs = [Run(0, "in the step", step), Run(0, "again", again), Run(1, "again", on_next), Run(2, "again", third)]
    runs.append(Run(1, "before", before))
    bits = judge(0, runs, float.__eq__)
    assert bits.culprit_ranks == culprits
    assert judge(0, runs, lambda first, second: abs(first - second) < NEAR).culprit_ranks == if_compiled


def test_most_steps_unlike_their_repetitions_are_noise_and_what_one_rank_repeats_is_a_fault() -> None:
    def found(*results: str) -> ReplayJudgement:
        runs = [Run(rank, "", result) for rank, result in zip((0, 0, 1, 2, 1), results, strict=True)]
        return judge(0, runs, str.__eq__, is_common=True)

    assert (found(*"xaaaa").culprit_ranks, found(*"xaaaa").is_noise) == ((), True)
    assert found(*"xxaaa").culprit_ranks == (0,)
    assert found(*"aaxax").culprit_ranks == (1,)
