"""Many random reductions and windows give what exact arithmetic in plain Python gives, on 1 to 8 ranks.

``DDPSTATS_TEST_REDUCTIONS`` is how many, and ``DDPSTATS_TEST_SEED`` the first seed. A failure names the seed whose
answer is wrong.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from ddpstats.testing import RankPool
from tests.reduction import reduce_pairs, window_pairs

REDUCTIONS = int(os.environ.get("DDPSTATS_TEST_REDUCTIONS", "100000"))
FIRST_SEED = int(os.environ.get("DDPSTATS_TEST_SEED", "0"))
SEEDS_AT_ONCE = 25
MOST_RANKS = 8
BATCHES_ON_ONE_RANK = 80  # with more ranks fewer, so that each world size takes about as long as the others


def test_many_random_reductions_are_exact() -> None:
    batches = batches_of_seeds(-(-REDUCTIONS // reduce_pairs.OF_A_SEED))
    while True:
        for ranks in range(1, MOST_RANKS + 1):
            with RankPool(ranks, timeout_sec=600) as pool:
                for runner in (reduce_pairs.of_pool(pool, "all"), reduce_pairs.of_threads(ranks)):
                    for seeds in itertools.islice(batches, BATCHES_ON_ONE_RANK // ranks):
                        reduce_pairs.check_many(runner, ranks, seeds)
                        if seeds.stop >= FIRST_SEED + REDUCTIONS // reduce_pairs.OF_A_SEED:
                            return


def batches_of_seeds(count: int) -> Iterator[range]:
    for first in range(FIRST_SEED, FIRST_SEED + count, SEEDS_AT_ONCE):
        yield range(first, min(first + SEEDS_AT_ONCE, FIRST_SEED + count))


def test_many_random_windows_are_exact(two_ranks: RankPool) -> None:
    seed, adds = FIRST_SEED, 0
    while adds < REDUCTIONS:
        adds += window_pairs.check_many(two_ranks, 2, range(seed, seed + SEEDS_AT_ONCE), "many")
        seed += SEEDS_AT_ONCE
