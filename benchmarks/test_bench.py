"""scripts/bench.py --quick reports every row, and writes its numbers and its picture."""

from __future__ import annotations

import json
from pathlib import Path

from tests import programs
from tests.needs import needs

SCRIPTS = Path(__file__).parents[1] / "scripts"
LIMIT_SEC = 600


def test_quick_run_reports_every_row_writes_json_and_draws(tmp_path: Path) -> None:
    needs("matplotlib")
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    command = [str(SCRIPTS / "bench.py"), "--quick", "--json", str(numbers), "--png", str(picture)]
    done = programs.run(command, timeout=LIMIT_SEC, fresh=True)
    assert done.returncode == 0, done.stderr
    for row in (
        "2 ranks, 10 keys: tensors, faster than per leaf",
        "2 ranks, 50 keys: drop-in, faster than per leaf",
        "2 ranks, 50 keys: floats / bare all_reduce",
        "2 ranks, 10 keys: floats, alternating / same keys",
        "2 ranks, 50 keys: floats, per_rank / without",
        "2 ranks, 4 calls, each with new keys: 10",
        "payload: a path, 50 keys",
        "first call, peak beside the result",
        "steady call, peak beside the result",
        "import ddpstats, beyond a bare interpreter",
        "import ddpstats: loads torch",
        "window, add of 1,000 tensors / float() of each",
        "window, 50 adds of 10 tensors and a flush / 50 reductions",
        "sentinel, a DDP step of 10 ms and more: layer 1, 25 checkpoints / plain",
        "sentinel, a DDP step of 10 ms and more: layer 4, window open / plain",
        "checks, a DDP step of 24 layers: apart, stats / plain",
        "checks, a DDP step of 24 layers: together / bare",
        "checks, a DDP step of 24 layers: our collectives, together",
        "dump, a step of a small transformer: idle / plain",
        "dump, a step of a small transformer: mix, async / sync",
    ):
        assert row in done.stdout
    assert "2 ranks, 50 keys" in done.stderr  # progress
    written = json.loads(numbers.read_text())
    assert written["machine"]["torch"]
    assert {row["verdict"] for row in written["rows"]} <= {"ok", "short", "noisy", "-"}
    assert [(timed["world_size"], timed["keys"]) for timed in written["timed"]] == [(2, 10), (2, 50)]
    spread = written["timed"][0]["lean_seconds"]["floats"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 0 < spread["lower"] <= spread["median"] <= spread["upper"]
