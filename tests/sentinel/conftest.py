"""Restart the shared ranks before the sentinel's tests: nothing was compiled on them then."""

from __future__ import annotations

import pytest

from ddpstats.testing import RankPool


@pytest.fixture(autouse=True, scope="package")
def nothing_was_compiled(two_ranks: RankPool, three_ranks: RankPool) -> None:
    """On ranks on which another room's test has compiled something, peer replay leaves room for rounding."""
    two_ranks.restart()
    three_ranks.restart()
