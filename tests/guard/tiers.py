"""Parameters of tests, some of which only `scripts/launch.sh test --all` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def tiers(unmarked: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """Return all cases, those of ``slow`` with the mark of this name. A tuple is the arguments of one case."""
    marked = [case if isinstance(case, tuple) else (case,) for case in slow]
    return [*unmarked, *(pytest.param(*case, marks=pytest.mark.slow) for case in marked)]
