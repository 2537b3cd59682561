"""The reference accelerator is compiled before any rank starts, so that no rank's time limit pays for the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpstats.testing import RankPool

from .build import built, missing


@pytest.fixture(scope="session")
def refdev() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    built()


@pytest.fixture(scope="module")
def refdev_rank(refdev: None) -> Iterator[RankPool]:
    with RankPool(1, timeout_sec=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def refdev_ranks(refdev: None) -> Iterator[RankPool]:
    with RankPool(2, timeout_sec=120) as pool:
        yield pool
