"""Fixtures: a process that tests may end, and a clock that they move."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.programs import Program
from tests.ranks.clock import clock as clock


@pytest.fixture
def child() -> Iterator[Program]:
    with Program(["-c", "import time; time.sleep(600)"], os.environ, fresh=True) as program:
        yield program
