"""TrainCheck's errors that concern ranks are seen in the step that has them; the right programs pass."""

from __future__ import annotations

import pytest

from ddpstats.testing import RankPool
from tests import traincheck_runs as runs

CHECKS = ("sentinel", "strict", "step")
SEEN_BY = {
    "clipped_apart": {"sentinel": "gradient norm.weight (float32 [6]): rank 0 against rank 1"},
    "hooks_lost": {"sentinel": "gradient first.weight"},
    "sometimes_wrapped": {"sentinel": "gradient first.weight"},
    "result_lost": {"sentinel": "gradient weight (float32 [3, 6]): rank 0 against rank 1"},
    "without_tokens": dict.fromkeys(("strict", "step"), "rank 0: all_to_all_single()"),
}
"""What says so, of the sentinel's replica digests and the guard's two modes, and in which words."""

pytestmark = pytest.mark.slow


def trained(pool: RankPool, error: str, broken: bool, checks: str) -> list[tuple[int, str] | None]:
    endings: list[tuple[int, str] | None] = pool.run(runs.train, error, broken, checks, timeout_sec=90).values()
    return endings


@pytest.mark.parametrize("checks", CHECKS)
def test_right_programs_pass_and_so_do_errors_that_the_check_is_not_for(two_ranks: RankPool, checks: str) -> None:
    for error in runs.ERRORS:
        assert trained(two_ranks, error, False, checks) == [None, None]
        if checks not in SEEN_BY[error] and error != "without_tokens":  # which hangs without a guard
            assert trained(two_ranks, error, True, checks) == [None, None]


@pytest.mark.parametrize(("error", "checks"), [(error, checks) for error in SEEN_BY for checks in SEEN_BY[error]])
def test_an_error_is_seen_in_its_step(two_ranks: RankPool, error: str, checks: str) -> None:
    for ending in trained(two_ranks, error, True, checks):
        assert ending is not None
        step, text = ending
        assert step == runs.FAULTY_STEP
        assert SEEN_BY[error][checks] in text
    two_ranks.restart()
