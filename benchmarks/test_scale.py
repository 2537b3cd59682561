"""scripts/scale.py counts what many ranks send, measures a few real ones, and draws both."""

from __future__ import annotations

import json
from pathlib import Path

from tests import programs
from tests.needs import needs

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_scale_script_counts_measures_and_draws(tmp_path: Path) -> None:
    needs("matplotlib")
    numbers, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    command = [str(SCRIPTS / "scale.py"), "--ranks", "8", "--real", "2", "--json", str(numbers), "--png", str(picture)]
    done = programs.run(command, timeout=200)
    assert done.returncode == 0, done.stderr
    for row in ("guard, verdict", "2 in a grid", "a call in one ring, ms", "a call in the grid, ms"):
        assert row in done.stdout
    measured = json.loads(numbers.read_text())
    assert [run["median"]["files"] > 0 for run in measured["real"]] == [True, True]
    assert measured["constants"]["hop_sec"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
