"""A collective's reduce op is observed where Python issues it, for a torch whose operators do not have it."""

from __future__ import annotations

import pytest

from ddpstats.testing import RankPool
from tests.observe import caller_runs as runs


def test_reduce_ops_are_those_that_python_asked_for(two_ranks: RankPool) -> None:
    outcomes = two_ranks.run(runs.reduced_by).values()
    two_ranks.restart()  # the ranks take their torch for an older one
    assert outcomes == [
        (
            [
                ("all_reduce", "max", True),
                ("reduce", "min", True),
                ("reduce_scatter", "sum", False),
                ("all_reduce", None, False),
            ],
            True,
        )
    ] * 2  # fmt: skip


@pytest.mark.slow
def test_a_collective_that_ends_while_a_slice_does_has_not_failed(two_ranks: RankPool) -> None:
    """torch reports that the wait was too short; by the time that is examined, the collective is complete."""
    assert max(two_ranks.run(runs.waits_in_slices, 500, timeout_sec=60).values()) > 0
