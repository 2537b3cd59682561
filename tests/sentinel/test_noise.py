"""Natural noise, a rank in doubt, or another step: from what ranks tell of their repetitions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpstats import ConfigError
from ddpstats.sentinel._noise import Noise, measured

SWITCH = "torch.use_deterministic_algorithms(True)"


def offer(distance: float | None, *, repeats: bool = False, loose: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"distance": distance, "repeats": repeats, "loose": list(loose)}


def test_nothing_is_learnt_where_no_rank_could_tell() -> None:
    assert measured({0: offer(None), 1: offer(None)}) is None


def test_a_rank_is_in_doubt_where_most_ranks_repeat_themselves() -> None:
    assert measured({0: offer(0.0), 1: offer(0.5, repeats=True), 2: offer(0.0), 3: offer(None)}) == Noise(0.0, (1,))


def test_noise_of_most_ranks_is_measured_and_the_switches_that_are_not_set_are_named_with_their_ranks() -> None:
    found = measured({0: offer(1e-6), 1: offer(2e-6, loose=(SWITCH,))})
    assert found is not None
    assert (found.room, found.doubted) == (8 * 2e-6, ())
    assert "differ by up to 2.0e-06 of the largest one" in found.text
    assert found.text.endswith(f"{SWITCH} on rank 1 may make it repeat itself.")
    found = measured({0: offer(1e-6)})
    assert found is not None
    assert "Deterministic algorithms are on" in found.text


@pytest.mark.parametrize(
    ("distance", "repeats", "words"),
    [
        (1e-6, True, "twice the same gradients, and others than in the step"),
        (0.5, False, "other gradients each time than in the step"),
        (math.inf, False, "norms differ by up to inf"),
    ],
)
def test_what_does_not_resemble_the_step_is_another_one(distance: float, repeats: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"not the step that was trained[\s\S]*{words}"):
        measured({0: offer(distance, repeats=repeats), 1: offer(distance, repeats=repeats)})
