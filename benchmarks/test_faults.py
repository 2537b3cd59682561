"""The table in docs/reliability.md on two ranks: whatever happens to one of them, the other raises it in time.

`scripts/faults.py` plays it on more ranks, and writes the page.
"""

from __future__ import annotations

import pytest

from tests.faults.cases import play, shortfalls
from tests.faults.injuries import CannotMount, Case, cells


@pytest.mark.parametrize("case", cells(2, 5.0, 3.0), ids=lambda case: f"{case.phase}, {case.fault}")
def test_rank_that_lives_raises_what_is_promised(case: Case) -> None:
    try:
        seen = play(case)
    except CannotMount as error:
        pytest.skip(str(error))
    assert shortfalls(case, seen) == []
