"""Ranks that live raise one `RankMissing` in time, whatever happens to another rank in a call, and leave nothing.

This is a sample of the table in docs/reliability.md; `benchmarks/test_faults.py` plays all of it on two ranks. Left out
is what other tests show: ranks that are killed or late in a reduction (`tests/ranks`), a rank that raises in its
micro-batch, and one that cannot write its part of a bundle (`tests/capture`).
"""

from __future__ import annotations

import pytest

from tests.faults.cases import play, shortfalls
from tests.faults.injuries import CannotMount, Case

TIMEOUT_SEC = 8.0  # the machine may be busy
STOPPED_SEC = 4.0  # where the others wait for it

CASES = [
    Case("window", "stop", 2, STOPPED_SEC),
    Case("guard compared", "exception", 2, TIMEOUT_SEC),
    Case("step checks", "interrupt", 2, TIMEOUT_SEC),
    Case("bundle", "kill", 2, TIMEOUT_SEC),
    Case("dump", "limited", 2, TIMEOUT_SEC),
    Case("capture", "late", 2, TIMEOUT_SEC, late_sec=1.0),
]
SLOW = [
    Case("step checks", "kill", 3, TIMEOUT_SEC),
    Case("guard step", "stop", 3, STOPPED_SEC),
    Case("guard compared", "stop", 4, STOPPED_SEC),
    Case("guard strict", "interrupt waiting", 2, TIMEOUT_SEC),
    Case("guard strict", "host", 2, TIMEOUT_SEC),
    Case("new keys", "host", 2, TIMEOUT_SEC),
    Case("bundle", "full", 2, TIMEOUT_SEC),
    Case("dump", "kill", 2, TIMEOUT_SEC),
    Case("dump", "read-only", 2, TIMEOUT_SEC),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: f"{case.phase}, {case.fault}",
)
def test_ranks_that_live_raise_the_same_in_time(case: Case) -> None:
    try:
        seen = play(case)
    except CannotMount as error:
        pytest.skip(str(error))
    assert shortfalls(case, seen) == []
