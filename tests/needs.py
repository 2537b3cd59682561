"""Skips a test whose library is not installed, with the command that installs it.

A test that needs a library beside torch and pytest is marked ``library``: `scripts/launch.sh test` leaves it out, and
`scripts/launch.sh test --all` installs every library and runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def needs(*packages: str) -> None:
    """Skip the calling test, or the calling module, where one of these packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package} here: `scripts/launch.sh test --all` installs it", allow_module_level=True)


def imported(module: str) -> Any:
    """Import a module of a library without the warnings that it gives when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)
