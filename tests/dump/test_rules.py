"""Relative errors, verdicts and highlighting."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpstats.dump.compare._rules import Closeness, Runs, difference, is_over, statistics_color, tensor_color

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (3.0, 2.0, (1.0, 0.5)),
        (-3.0, -2.0, (-1.0, 0.5)),
        (0.0, 0.0, (0.0, 0.0)),
        (0.0, -0.0, (0.0, 0.0)),
        (1.0, 0.0, (1.0, INF)),
        (NAN, NAN, (0.0, 0.0)),
        (NAN, 1.0, (NAN, NAN)),
        (1.0, NAN, (NAN, NAN)),
        (INF, INF, (0.0, 0.0)),
        (-INF, INF, (-INF, INF)),
        (1.0, INF, (-INF, INF)),
        (INF, NAN, (NAN, NAN)),
        (None, 1.0, (None, None)),
    ],
)
def test_difference(a: Any, b: Any, expected: Any) -> None:
    assert difference(a, b) == pytest.approx(expected, nan_ok=True)


def test_over() -> None:
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
def test_accurate(cosine: float, max_abs: float, accurate: bool) -> None:
    close = Closeness(cosine, 0.0, max_abs, 0.0, 1.0, 1.0, Runs(1, 1, 1, 1, ((0, 1),), 4))
    assert close.accurate is accurate


@pytest.mark.parametrize(
    ("role", "maxima", "minimum", "differences", "inputs", "color"),
    [
        ("input", (NAN, 1.0), 0.0, [NAN], [], "red"),
        ("", (1.0, 1.0), -INF, [0.0], [], "red"),
        ("input", (1.0, NAN), 0.0, [NAN], [], None),
        ("input", (1.0, 1.0), 0.0, [1e11], [], "red"),
        ("output", (2.0, 1.0), 0.0, [1.0], [], "red"),
        ("output", (0.001, 0.0), 0.0, [0.001], [], None),
        ("input", (2.0, 1.0), 0.0, [1.0], [], None),
        ("output", (1020.0, 1000.0), 0.0, [20.0], [(1001.5, 1000.0)], "yellow"),
        ("output", (1010.0, 1000.0), 0.0, [10.0], [(1001.5, 1000.0)], None),
        ("output", (1.2, 1.0), 0.0, [0.2], [(1.0, 1.0), (1.005, 1.0)], "yellow"),
        ("output", (1.2, 1.0), 0.0, [0.2], [(1.0, 1.0), (1.02, 1.0)], None),
        ("output", (None, None), None, [None], [], None),
    ],
)
def test_color_of_statistics(role: Any, maxima: Any, minimum: Any, differences: Any, inputs: Any, color: Any) -> None:
    found = statistics_color(role, maxima, minimum, differences, inputs)
    assert (found[0] if found is not None else None) == color


def test_color_of_tensors() -> None:
    assert tensor_color(0.5, 1.0, [0.95], [1.0]) == (
        "red",
        "the one thousandth ratio falls from above 0.9 to below 0.6 between input and output",
    )
    assert (tensor_color(0.7, 1.0, [0.85], [1.0]) or ("",))[0] == "yellow"
    assert (tensor_color(0.9, 0.8, [0.95], [0.95]) or ("",))[0] == "yellow"
    assert tensor_color(0.9, 0.9, [0.95], [0.95]) is None
    assert tensor_color(0.1, 0.1, [], []) is None
