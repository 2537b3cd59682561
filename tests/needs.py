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


class Late:
    """A module that is imported when one of its names is first used, since each worker collects all tests.

    A library takes seconds to import, and most workers run none of its tests.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for __test__ and _mock_name while it collects
            raise AttributeError(name)
        return getattr(imported(self._module), name)
