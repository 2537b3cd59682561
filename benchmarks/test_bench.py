"""scripts/bench.py --quick reports every row."""

from __future__ import annotations

from pathlib import Path

from tests import programs

SCRIPTS = Path(__file__).parents[1] / "scripts"
LIMIT_SEC = 1800


def test_quick_run_reports_every_row() -> None:
    done = programs.run([str(SCRIPTS / "bench.py"), "--quick"], timeout=LIMIT_SEC, fresh=True)
    assert done.returncode == 0, done.stderr
    for row in (
        "2 ranks, 10 keys: tensors, faster than per leaf",
        "2 ranks, 50 keys: drop-in, faster than per leaf",
        "4 ranks, 100,000 keys: floats / bare all_reduce",
        "2 ranks, 10 keys: floats, alternating / same keys",
        "2 ranks, 50 keys: floats, per_rank / without",
        "2 ranks, calls with new keys: 10 in each",
        "2 ranks, 50 keys: payload of a path",
        "memory of a path, 100,000 floats: first call, peak beside the result",
        "memory of a path, 100,000 floats: steady call, peak beside the result",
        "import ddpstats, beyond a bare interpreter",
        "window, add of 1,000 tensors / float() of as many",
        "window, add of 10 leaves, most of them marked / float() of as many",
        "window, 50 adds of 10 tensors and a flush / 50 reductions",
        "guard step, 1 float / plain",
        "guard strict, over the store, 1M floats / plain",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL, 1 float / plain",
        "guard step, a DDP step / plain",
        "a label, a dict's walk",
        "NaN capture, a DDP step of 80 ms and more / plain",
        "sentinel, a DDP step of 100 ms and more: layer 1, 25 checkpoints / plain",
        "sentinel, a DDP step of 800 ms and more: layer 4, window open / plain",
        "sentinel, peak memory of an exam of layer 3 / parameters",
        "checks, a DDP step of 24 layers: apart / plain",
        "checks, a DDP step of 24 layers: together, window / bare",
        "checks, a DDP step of 24 layers: our collectives, together",
        "dump, a step of a small transformer: idle / plain",
        "dump, a step of a small transformer: mix, async / sync",
        "dump, a step of a small transformer: mix by msprobe / plain",
        "lightning, a step that logs 10 keys: faster than stock",
        "accelerate, a step that logs 10 keys: faster than stock",
    ):
        assert row in done.stdout
    assert "reduction 50 on 2 ranks" in done.stderr  # progress
