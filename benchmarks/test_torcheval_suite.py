"""What torcheval's own tester of metrics accepts without us, it accepts with our patch, and under the guard, too."""

from __future__ import annotations

import pytest

from benchmarks import suites
from tests.needs import needs

pytestmark = pytest.mark.library
needs("torcheval")
LEAST_METRICS = 8


def passed(way: str) -> list[str]:
    ended = suites.alone("torcheval", way, "torcheval_suite_runs")
    assert ended.statuses == [0], ended.stderr[-6000:]
    return ended.stdout.split()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return passed("bare")


@pytest.mark.parametrize("way", suites.WITH_US)
def test_torchevals_own_tester_passes_as_it_passes_without(way: str, expected: list[str]) -> None:
    assert len(expected) >= LEAST_METRICS
    assert passed(way) == expected
