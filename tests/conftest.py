"""Pools of real gloo ranks, shared by the whole session: starting one costs seconds, a call on it milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpstats.testing import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_sec=60) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    with RankPool(3, timeout_sec=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Of one module only: four processes are many for two cores."""
    with RankPool(4, timeout_sec=60) as pool:
        yield pool
