"""Many random reductions and windows give what exact arithmetic in plain Python gives, on 1 to 8 ranks.

``DDPSTATS_TEST_REDUCTIONS`` is how many, and ``DDPSTATS_TEST_SEED`` the first seed. A failure names the seed whose
answer is wrong.
"""

from __future__ import annotations

import os

from ddpstats.testing import RankPool
from tests.reduction import reduce_pairs, window_pairs

REDUCTIONS = int(os.environ.get("DDPSTATS_TEST_REDUCTIONS", "100000"))
FIRST_SEED = int(os.environ.get("DDPSTATS_TEST_SEED", "0"))
WINDOWS_AT_ONCE = 100


def test_many_random_reductions_are_exact() -> None:
    reduce_pairs.main(FIRST_SEED, -(-REDUCTIONS // reduce_pairs.OF_A_SEED))


def test_many_random_windows_are_exact(two_ranks: RankPool) -> None:
    seed, adds = FIRST_SEED, 0
    while adds < REDUCTIONS:
        adds += window_pairs.check_many(two_ranks, 2, range(seed, seed + WINDOWS_AT_ONCE), "many")
        seed += WINDOWS_AT_ONCE
