"""The fixture with which several tests of the guard write their programs; all of them need a torch of the guard's."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.capabilities import needs_guard


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Return a function that writes a program of these parts to a file, and returns its path."""

    def write(*parts: str) -> str:
        path = tmp_path / "train.py"
        path.write_text("".join(map(textwrap.dedent, parts)))
        return str(path)

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder on a torch that the guard refuses."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_guard)
