"""Pools of real gloo ranks, shared by the whole session: starting one costs seconds, a call on it milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpstats.testing import RankPool
from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_process import rank_environ
from ddpstats.testing._rank_server import RankServer

# What optimizers and DDP import at their first use, and what the ranks' own modules import
PRELOADED = ("torch._dynamo", "numpy", "pytest")


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[RankServer]:
    """Ranks are forked from a process that has torch: to import it takes longer than most tests."""
    with RankServer(rank_environ(RankSpec(0, 1, 0, 0, 0, 0), {}), PRELOADED) as server:
        yield server


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
