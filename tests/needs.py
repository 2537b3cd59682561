"""Which libraries a test file needs beside torch and pytest: the table, and the skip where one is missing.

``tests/libraries.txt`` is the one table: `scripts/launch.sh test PATH` installs what its lines for ``PATH`` say, and a
test that needs a library says so by `needs`, which refuses a file that the table does not have. So the two cannot part.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SKIP_NOTHING = "DDPSTATS_TEST_SKIPS_NOTHING"
_EXTRAS = {
    "espnet2": "espnet",
    "matplotlib": "bench",
    "rich": "live",
    "aiohttp": "lightning",
    "funasr": "espnet",
}  # the others are named as what is imported


def table() -> dict[str, list[str]]:
    """Path of a test file, from the repository -> the extras of setup.cfg that it needs beside "testing"."""
    lines = (ROOT / "tests" / "libraries.txt").read_text().splitlines()
    return {path: extras for path, *extras in (line.split() for line in lines if line and not line.startswith("#"))}


def needs(*packages: str) -> None:
    """Skip the calling test, or file, where one of these is not installed. The reason has the command that mends it."""
    file = Path(sys._getframe(1).f_code.co_filename).relative_to(ROOT).as_posix()
    for package in packages:
        extra = _EXTRAS.get(package, package)
        assert extra in table().get(file, ()), f"{file} needs {extra}: tests/libraries.txt has to say so"
        if importlib.util.find_spec(package) is None:
            reason = f"no {package} here: `scripts/launch.sh test {file}` installs it"
            if os.environ.get(SKIP_NOTHING):
                pytest.fail(f"{reason}; {SKIP_NOTHING} is set, so nothing may be skipped for that")
            pytest.skip(reason, allow_module_level=True)


def imported(module: str) -> Any:
    """A module of a library that is there, without the warnings of its own that it gives when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)
