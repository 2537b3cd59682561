"""What several tests of the guard start from."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a program, and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write
