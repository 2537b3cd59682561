"""Of TrainCheck's errors, those that concern ranks are seen in the step that has them; the right programs pass."""

from __future__ import annotations

import pytest

from ddpstats.testing import run_ranks
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


CASES = [(error, checks) for error in runs.ERRORS for checks in CHECKS]
CASES.remove(("without_tokens", "sentinel"))  # without a guard the program hangs


@pytest.mark.parametrize(("error", "checks"), CASES)
def test_an_error_is_seen_in_its_step(error: str, checks: str) -> None:
    words = SEEN_BY[error].get(checks)
    for ending in run_ranks(runs.train, 2, error, True, checks, timeout_sec=90).values():
        if words is None:
            assert ending is None
        else:
            step, text = ending
            assert step == runs.FAULTY_STEP
            assert words in text


@pytest.mark.parametrize("error", runs.ERRORS)
@pytest.mark.parametrize("checks", CHECKS)
def test_the_right_program_passes(error: str, checks: str) -> None:
    assert run_ranks(runs.train, 2, error, False, checks, timeout_sec=90).values() == [None, None]
