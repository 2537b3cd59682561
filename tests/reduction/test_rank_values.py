"""`RankValues` names extremes and outliers of the values of one path (docs/reductions.md)."""

from __future__ import annotations

import math
import pickle
import statistics
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ddpstats import ConfigError, RankValues


def of(*values: float | bool | None, ranks: tuple[int, ...] | None = None) -> RankValues:
    return RankValues(values, tuple(range(len(values))) if ranks is None else ranks)


def test_the_extremes_are_named_by_global_rank() -> None:
    held = of(2.0, None, -1.0, 7.0, 7.0, -1.0, ranks=(4, 5, 6, 7, 8, 9))
    assert (held.min_rank, held.max_rank) == (6, 7)
    assert held.worst(2) == ((7, 7.0), (8, 7.0))
    assert held.worst() == ((7, 7.0),)
    assert held.worst(0) == ()
    assert [rank for rank, _ in held.worst(99)] == [7, 8, 6, 9, 4]


def test_who_is_farthest_from_the_median() -> None:
    assert of(1.0, 1.1, 0.9, 5.0).worst(1) == ((3, 5.0),)
    assert of(1.0, -9.0, 1.1, 0.9, 5.0).worst(2) == ((1, -9.0), (4, 5.0))
    assert of(3.0, 1.0).worst(2) == ((0, 3.0), (1, 1.0))  # equally far: in the order of the ranks


def test_path_that_no_rank_holds_has_no_extremes_and_nan_spread() -> None:
    for held in (of(None, None), of(math.nan, None)):
        assert (held.min_rank, held.max_rank) == (None, None)
        assert math.isnan(held.median)
        assert math.isnan(held.std)
    assert of(None, None).worst(2) == ()


def test_what_is_not_finite_is_worst_and_leaves_the_median_alone() -> None:
    held = of(1.0, math.nan, 3.0, math.inf, -math.inf, 2.0)
    assert (held.median, held.min_rank, held.max_rank) == (2.0, 4, 3)
    assert held.std == pytest.approx(statistics.pstdev([1.0, 3.0, 2.0]))
    assert [rank for rank, _ in held.worst(4)] == [1, 3, 4, 0]


def test_flags_are_ordered_as_0_and_1_and_stay_bools() -> None:
    held = of(True, False, True, True)
    assert (held.min_rank, held.max_rank, held.median) == (1, 0, 1.0)
    assert type(held.median) is float
    assert held.worst(1) == ((1, False),)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, 1e200, 5e-324, -0.0])
def test_equal_values_have_no_spread(value: float) -> None:
    assert (of(value, value, value).std, of(value, value, value).median) == (0.0, value)


@given(st.lists(st.floats(-1e200, 1e200), min_size=1, max_size=9))
def test_median_and_std_hold_for_any_values_of_a_reduction(values: list[float]) -> None:
    held = of(*values)
    assert min(values) <= held.median <= max(values)
    assert 0 <= held.std <= max(values) - min(values)


def test_a_number_of_ranks_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="k=-1 must be a number of ranks"):
        of(1.0).worst(-1)


def test_it_can_be_sent_and_compared() -> None:
    held: Any = pickle.loads(pickle.dumps(of(1.0, None)))
    assert held == of(1.0, None)
    assert held.median == 1.0
