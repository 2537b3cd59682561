"""No false alarm in this project's own tests, run under ``DDPSTATS_GUARD=strict``: their ranks issue legal collectives.

A part of them, for time. Tests that show the faults of stock libraries could not pass so, nor those that importing
ddpstats loads no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_false_alarm_in_our_own_tests() -> None:
    files = ["tests/agreement/test_gather.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "DDPSTATS_GUARD": "strict"},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "CollectiveMismatch" not in done.stdout + done.stderr
