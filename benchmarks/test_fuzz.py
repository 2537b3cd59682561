"""Readers of foreign bytes raise documented errors only, on two minutes of changed bytes each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts import fuzz
from tests.fuzz import targets

SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[None]:
    yield
    targets.leave()


@pytest.mark.parametrize("name", targets.TARGETS)
def test_long_run_of_changed_bytes_raises_documented_errors_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.by_chance(name, SECONDS, seed=11) == 0, capsys.readouterr().out
