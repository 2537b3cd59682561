"""Repetitions of a micro-batch are judged: as noise, another step, or a fault of the rank that differs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.sentinel.peer_replay import Judgement, Noise, Run, judge, measured

LIMIT = 1e-2
SWITCH = "torch.use_deterministic_algorithms(True)"


def offer(
    distance: float | None, *, repeats: bool = False, loose: tuple[str, ...] = (), compiled: bool = False
) -> dict[str, Any]:
    return {"distance": distance, "repeats": repeats, "loose": list(loose), "compiled": compiled}


def test_no_noise_is_measured_where_no_rank_could_measure() -> None:
    assert measured({0: offer(None), 1: offer(None)}, LIMIT) is None


def test_a_rank_is_in_doubt_where_most_ranks_repeat_themselves() -> None:
    assert measured({0: offer(0.0), 1: offer(0.5, repeats=True), 2: offer(0.0), 3: offer(None)}, LIMIT) == Noise(
        0.0, (1,)
    )


def test_noise_of_most_ranks_is_measured_and_the_switches_that_are_not_set_are_named_with_their_ranks() -> None:
    found = measured({0: offer(1e-6), 1: offer(2e-6, loose=(SWITCH,))}, LIMIT)
    assert found is not None
    assert (found.room, found.doubted) == (8 * 2e-6, ())
    assert "differ by up to 2.0e-06 of the largest one" in found.text
    assert found.text.endswith(f"{SWITCH} on rank 1 may make it repeat itself.")
    rounded = measured({0: offer(1e-6, repeats=True)}, LIMIT)
    assert rounded is not None
    assert rounded.room == 8 * 1e-6
    assert "the step rounds otherwise when it is run again" in rounded.text
    at_most = measured({0: offer(5e-3)}, LIMIT)
    assert at_most is not None
    assert at_most.room == LIMIT
    found = measured({0: offer(1e-6)}, LIMIT)
    assert found is not None
    assert "Deterministic algorithms are on" in found.text


@pytest.mark.parametrize(
    ("distance", "repeats", "words"),
    [
        (1e-3, True, "twice the same gradients, and others than in the step"),
        (2e-16, True, "twice the same gradients, and others than in the step"),
        (0.5, False, "other gradients each time than in the step"),
        (math.inf, False, "norms differ by up to inf"),
    ],
)
def test_a_replay_unlike_the_step_is_an_error_of_replay_fn(distance: float, repeats: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"not the step that was trained[\s\S]*{words}"):
        measured({0: offer(distance, repeats=repeats), 1: offer(distance, repeats=repeats)}, LIMIT)


def rounding(distance: float) -> dict[str, Any]:
    return offer(distance, repeats=True, compiled=True)


@pytest.mark.parametrize(
    ("offers", "room", "doubted"),
    [
        ([rounding(0.0), rounding(2e-7)], LIMIT, ()),
        ([rounding(0.0), rounding(1e-300), rounding(0.0)], LIMIT, ()),
        ([rounding(0.0), rounding(8e-4), rounding(0.0)], LIMIT, ()),
        ([rounding(0.0), rounding(8e-3), rounding(0.0)], LIMIT, ()),
        ([rounding(0.0), rounding(2e-2), rounding(0.0)], 0.0, (1,)),
        ([rounding(0.0), rounding(2e-7), rounding(0.5), rounding(0.0)], LIMIT, (2,)),
        ([rounding(3e-7), rounding(2e-7), rounding(0.5)], LIMIT, (2,)),
        ([rounding(0.0), offer(2e-7, compiled=True)], LIMIT, ()),
        ([rounding(0.0), offer(2e-7, repeats=True)], LIMIT, ()),
        ([offer(None), rounding(2e-7)], LIMIT, ()),
        ([offer(0.0), offer(2e-7, repeats=True)], 0.0, (1,)),
    ],
    ids=[
        *("one of two", "hardly", "in bfloat16", "at most", "beyond", "one rounds and one is wrong", "most round"),
        *("without repeating", "compiled on another rank", "the others have nothing", "not compiled"),
    ],
)
def test_where_something_was_compiled_what_may_be_rounding_puts_no_rank_in_doubt(
    offers: list[dict[str, Any]], room: float, doubted: tuple[int, ...]
) -> None:
    found = measured(dict(enumerate(offers)), LIMIT)
    assert found is not None
    assert (found.room, found.doubted) == (room, doubted)
    assert bool(found.text) == (room > 0)


def judged(*runs: tuple[int, str]) -> Judgement:
    """(rank, result) of rank 0's micro-batch, in the order in which they were run."""
    return judge(0, [Run(rank, f"time {place}", result) for place, (rank, result) in enumerate(runs)], str.__eq__)


@pytest.mark.parametrize(
    ("runs", "culprits", "words"),
    [
        ([(0, "x"), (0, "a"), (1, "a"), (2, "a"), (1, "a")], (0,), "Rank 0 was wrong once and right once: a transient"),
        ([(0, "x"), (0, "x"), (1, "a"), (2, "a"), (1, "a")], (0,), "Rank 0 is wrong each time: a lasting fault"),
        ([(0, "x"), (0, "a"), (1, "a"), (1, "a")], (0,), "Rank 0 was wrong once and right once"),
        ([(0, "x"), (0, "a"), (0, "a")], (0,), "Rank 0 was wrong once and right once"),
    ],
    ids=["transient", "lasting", "two ranks", "alone"],
)
def test_what_two_ranks_agree_on_is_right(runs: list[tuple[int, str]], culprits: tuple[int, ...], words: str) -> None:
    found = judged(*runs)
    assert found.culprit_ranks == culprits
    assert words in found.text
    assert not found.is_noise


def test_two_ranks_that_each_repeat_themselves_have_no_culprit() -> None:
    found = judged((0, "x"), (0, "x"), (1, "a"), (1, "a"))
    assert (found.culprit_ranks, found.is_noise) == ((), False)
    assert "a third rank would have to decide" in found.text
    assert "result A: rank 0 time 0, rank 0 time 1" in found.text


@pytest.mark.parametrize("runs", [[(0, "x"), (0, "y"), (1, "a"), (1, "b")], [(0, "x"), (0, "y"), (0, "z")]])
def test_runs_that_are_all_different_are_noise(runs: list[tuple[int, str]]) -> None:
    found = judged(*runs)
    assert (found.culprit_ranks, found.is_noise) == ((), True)


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
    step, again, before, there, third = results
    runs = [Run(0, "in the step", step), Run(0, "again", again), Run(1, "again", there), Run(2, "again", third)]
    runs.append(Run(1, "before", before))
    bits = judge(0, runs, float.__eq__)
    assert bits.culprit_ranks == culprits
    compiled = judge(0, runs, float.__eq__, rounded=lambda one, other: abs(one - other) < NEAR)
    assert compiled.culprit_ranks == if_compiled
    assert compiled.is_rounding == (max(results) - min(results) < NEAR)


def test_most_steps_unlike_their_repetitions_are_noise_and_what_one_rank_repeats_is_a_fault() -> None:
    def found(*results: str) -> Judgement:
        runs = [Run(rank, "", result) for rank, result in zip((0, 0, 1, 2, 1), results, strict=True)]
        return judge(0, runs, str.__eq__, is_common=True)

    assert (found(*"xaaaa").culprit_ranks, found(*"xaaaa").is_noise) == ((), True)
    assert found(*"xxaaa").culprit_ranks == (0,)
    assert found(*"aaxax").culprit_ranks == (1,)
