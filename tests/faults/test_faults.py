"""A sample of the table in docs/reliability.md, which `scripts/faults.py` plays whole: ranks that are hurt in a call.

What is tested elsewhere as well is left out: ranks that are killed or late in a reduction (`tests/transport`), a rank
that raises in its micro-batch, and one that cannot write its part of a bundle (`tests/capture`).
"""

from __future__ import annotations

import pytest

from tests.faults.cases import play, shortfalls
from tests.faults.injuries import Case

TIMEOUT_SEC = 8.0  # the machine may be busy

CASES = [
    Case("window", "stop", 2, TIMEOUT_SEC),
    Case("guard step", "stop", 3, TIMEOUT_SEC),
    Case("guard compared", "exception", 3, TIMEOUT_SEC),
    Case("guard compared", "stop", 4, TIMEOUT_SEC),
    Case("guard strict", "interrupt waiting", 2, TIMEOUT_SEC),
    Case("step checks", "interrupt", 2, TIMEOUT_SEC),
    Case("new keys", "host", 2, TIMEOUT_SEC),
    Case("bundle", "kill", 2, TIMEOUT_SEC),
    Case("bundle", "full", 2, TIMEOUT_SEC),
    Case("dump", "kill", 2, TIMEOUT_SEC),
    Case("dump", "limited", 2, TIMEOUT_SEC),
    Case("dump", "read-only", 2, TIMEOUT_SEC),
    Case("capture", "late", 2, TIMEOUT_SEC, late_sec=2.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.phase}, {case.fault}")
def test_all_that_live_are_told_the_same_in_time(case: Case) -> None:
    try:
        seen = play(case)
    except PermissionError as error:
        pytest.skip(str(error))
    assert shortfalls(case, seen) == []
