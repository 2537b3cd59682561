"""Keys that a rank has stopped holding, told to who listens, by ranks that reduce."""

from __future__ import annotations

from ddpstats._reduction.held_keys import ROUNDS
from ddpstats.testing import RankPool
from tests.reduction import held_keys_runs


def test_a_key_is_told_of_when_it_is_held_no_more_and_when_it_comes_back(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(held_keys_runs.held_and_not).values()
    assert first == []
    assert second == [("held", ["snr"]), ("held", [])]


def test_keys_that_calls_take_turns_with_are_held(two_ranks: RankPool) -> None:
    assert two_ranks.run(held_keys_runs.in_turns).values() == [[], []]


def test_what_the_layout_has_dropped_is_forgotten(two_ranks: RankPool) -> None:
    """Keys of generated names cannot pile up."""
    for told in two_ranks.run(held_keys_runs.generated).values():
        (_, first), *_, (_, last) = told
        assert first == [f"step {step}" for step in range(ROUNDS)]
        assert last == []
