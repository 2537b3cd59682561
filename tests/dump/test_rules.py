"""`ddpstats compare` calls two values different by msprobe's rules: relative errors, verdicts and highlighted rows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpstats.dump.compare._rules import Closeness, Runs, difference, is_over, statistics_color

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (3.0, 2.0, (1.0, 0.5)),
        (0.0, -0.0, (0.0, 0.0)),
        (1.0, 0.0, (1.0, INF)),
        (NAN, NAN, (0.0, 0.0)),
        (NAN, 1.0, (NAN, NAN)),
        (INF, INF, (0.0, 0.0)),
        (-INF, INF, (-INF, INF)),
        (1.0, INF, (-INF, INF)),
        (INF, NAN, (NAN, NAN)),
        (None, 1.0, (None, None)),
    ],
)
def test_difference_and_relative_error_of_two_values(a: Any, b: Any, expected: Any) -> None:
    assert difference(a, b) == pytest.approx(expected, nan_ok=True)


def test_relative_error_at_the_tolerance_is_within_it_and_nan_never_is() -> None:
    assert not is_over([0.5, None, 0.0], 0.5)
    assert is_over([0.0, 0.50001], 0.5)
    assert is_over([NAN], 1e300)
    assert not is_over([INF], INF)


@pytest.mark.parametrize(
    ("cosine", "max_abs", "accurate"),
    [
        *((1.0, 0.0, True), (0.98, 0.0009, True), (0.98, 0.0011, False), (0.89, 0.0, False), (0.99, 1.0, True)),
        *((1.0, 1.01, False), (NAN, 0.0, False), (1.0, NAN, False)),
    ],
)
def test_tensor_is_accurate_by_cosine_and_largest_difference(cosine: float, max_abs: float, accurate: bool) -> None:
    close = Closeness(cosine, 0.0, max_abs, 0.0, 1.0, 1.0, Runs(1, 1, 1, 1, ((0, 1),), 4))
    assert close.accurate is accurate


@pytest.mark.parametrize(
    ("role", "maxima", "differences", "inputs", "color"),
    [
        ("input", (NAN, 1.0), [NAN], [], "red"),
        ("output", (2.0, 1.0), [1.0], [], "red"),
        ("input", (2.0, 1.0), [1.0], [], None),
        ("output", (1020.0, 1000.0), [20.0], [(1001.5, 1000.0)], "yellow"),
        ("output", (1.2, 1.0), [0.2], [(1.0, 1.0), (1.005, 1.0)], "yellow"),
    ],
)
def test_row_of_statistics_is_highlighted(role: Any, maxima: Any, differences: Any, inputs: Any, color: Any) -> None:
    highlight = statistics_color(role, maxima, 0.0, differences, inputs)
    assert (highlight[0] if highlight is not None else None) == color
