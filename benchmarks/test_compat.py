"""The versions in tests/compatibility.txt pass their tests, each run in an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.needs import ROOT

LIMIT_SEC = 3 * 3600
RUNS = [
    line.removeprefix("run ")
    for line in (ROOT / "tests" / "compatibility.txt").read_text().splitlines()
    if line.startswith("run ")
]


@pytest.mark.parametrize("arguments", RUNS)
def test_named_versions_pass_their_tests(arguments: str, tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "compat", *arguments.split()]
    command += ["--table", str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SEC)
    assert done.returncode == 0, done.stdout + done.stderr
