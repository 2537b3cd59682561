"""The fixture with which several tests of the guard write their programs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Return a function that writes a program of these parts to a file, and returns its path."""

    def write(*parts: str) -> str:
        path = tmp_path / "train.py"
        path.write_text("".join(map(textwrap.dedent, parts)))
        return str(path)

    return write
