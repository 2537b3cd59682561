"""A step run by one rank alone may not communicate; the rest of the process may."""

from __future__ import annotations

from ddpstats.testing import RankPool
from tests.sentinel import replay_runs as runs


def test_collectives_of_the_step_are_refused_and_those_of_other_threads_are_not(two_ranks: RankPool) -> None:
    for found in two_ranks.run(runs.refused_collectives).values():
        refused = "step_fn communicates (all_reduce), and only one rank runs it here"
        assert found == {"own": refused, "backward": refused, "thread": "none"}
