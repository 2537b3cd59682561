"""Parameters of tests, some of which only `scripts/launch.sh test --all` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def tiers(unmarked: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """Return all cases, those of ``slow`` with the mark of this name. A tuple holds the arguments of one case."""
    cases = [(case, ()) for case in unmarked] + [(case, pytest.mark.slow) for case in slow]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case, marks in cases]
