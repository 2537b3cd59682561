"""Parameters of tests, some of which only `scripts/launch.sh test --all` or `test --nightly` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def tiers(unmarked: Sequence[Any], slow: Sequence[Any], nightly: Sequence[Any] = ()) -> list[Any]:
    """Return all cases, those of ``slow`` and ``nightly`` with these marks. A tuple holds the arguments of one case."""
    cases: list[tuple[Any, Any]] = [(case, ()) for case in unmarked]
    cases += [(case, pytest.mark.slow) for case in slow] + [(case, pytest.mark.nightly) for case in nightly]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case, marks in cases]
