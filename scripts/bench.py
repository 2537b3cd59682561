"""Speed and memory of ddpstats, as ratios within one run.

    scripts/launch.sh bench [WORD ...] [--quick] [--gate] [--json PATH]

Each measurement is a function that runs on fresh gloo ranks of this machine, one thread each, and returns rows: a name,
samples (one per round), a limit. What it compares takes turns on the same ranks (`bench_rows.take_turns`). The numbers
are of this machine at this moment: while others use its cores, no ratio can be trusted, good ones as little as bad
ones. Where a row's quartiles show that, its verdict is "noisy".

On Linux all ranks run under SCHED_BATCH: a thread that wakes does not interrupt the one that woke it. Otherwise, where
there are as many ranks as cores, many small collectives wait for a whole time slice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_capture import capture, checks, sentinel, sentinel_memory
from bench_dump import dump, dump_by_msprobe, dump_idle
from bench_guard import guard, guard_ddp_step, guard_labels
from bench_integrations import integration
from bench_reduction import imports, memory, new_keys, reduction, window_add, window_flush
from bench_rows import Row, aligned

from ddpstats.testing import run_ranks

_LIMIT_SEC = 600.0  # of one measurement: a hang ends here


class Measurement(NamedTuple):
    """``function(seconds, argument)`` runs on ``ranks`` ranks and takes that many seconds beside its set-up."""

    function: Callable[..., list[Row]]
    ranks: int
    seconds: float
    argument: Any = None

    @property
    def name(self) -> str:
        argument = "" if self.argument is None else f" {self.argument}"
        return f"{self.function.__name__}{argument} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"


MEASUREMENTS = [
    *(Measurement(reduction, 2, 8, keys) for keys in (10, 50, 1_000, 100_000)),
    Measurement(reduction, 3, 3, 50),
    *(Measurement(reduction, 4, 3, keys) for keys in (10, 50, 1_000, 100_000)),
    *(Measurement(new_keys, 2, 6, keys) for keys in (1, 10)),
    Measurement(memory, 2, 0, 100_000),
    Measurement(imports, 1, 5),
    *(Measurement(window_add, 1, 8, keys) for keys in (10, 50, 1_000)),
    *(Measurement(window_flush, 2, 8, keys) for keys in (10, 50)),
    *(Measurement(guard, 2, 10, size) for size in ("1 float", "1M floats")),
    Measurement(guard_ddp_step, 2, 120),
    Measurement(guard_labels, 1, 2),
    *(Measurement(capture, 2, 40, step_ms) for step_ms in (80, 400)),
    *(Measurement(sentinel, 2, 60, step_ms) for step_ms in (100, 800)),
    *(Measurement(sentinel_memory, 1, 0, layer) for layer in ("layer 2", "layer 3")),
    Measurement(checks, 2, 150, 100),
    *(Measurement(dump, 1, 40, what) for what in ("statistics", "async", "tensors")),
    Measurement(dump_idle, 1, 40),
    *(Measurement(dump_by_msprobe, 1, 15, kind) for kind in ("L0", "L1", "mix", "mix, tensors")),
    *(Measurement(integration, 2, 10, name) for name in ("lightning", "torchmetrics", "torcheval", "accelerate")),
]


def machine() -> str:
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    hardware = f"{(*models, platform.machine())[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    software = f"Python {platform.python_version()}, torch {torch.__version__}, gloo"
    return f"{time.strftime('%Y-%m-%d')}, {hardware}, {software}"


def main(argv: Sequence[str] | None = None) -> int:
    names = ", ".join(dict.fromkeys(measurement.function.__name__ for measurement in MEASUREMENTS))
    parser = argparse.ArgumentParser(prog="bench", description=f"Measure what ddpstats costs: {names}.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only measurements with one of these in their name")
    parser.add_argument("--quick", action="store_true", help="two rounds of each: the numbers mean little")
    parser.add_argument("--gate", action="store_true", help="exit with 1 where a limit was missed or noise hides it")
    parser.add_argument("--json", metavar="PATH", help="write the machine and all rows")
    args = parser.parse_args(argv)
    words = args.words or [""]
    chosen = [measurement for measurement in MEASUREMENTS if any(word in measurement.name for word in words)]
    if not chosen:
        parser.error(f"no measurement has {' or '.join(words)} in its name; there are {names}")

    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # the ranks inherit it
    host, started, rows = machine(), time.monotonic(), list[Row]()
    for measurement in chosen:
        print(f"bench [{time.monotonic() - started:6.1f} s] {measurement.name}", file=sys.stderr, flush=True)
        arguments = [0 if args.quick else measurement.seconds]
        if measurement.argument is not None:
            arguments.append(measurement.argument)
        outcomes = run_ranks(measurement.function, measurement.ranks, *arguments, timeout_sec=_LIMIT_SEC)
        rows += outcomes.values()[0]
    print(f"bench [{time.monotonic() - started:6.1f} s] done", file=sys.stderr)
    print(f"{host}\n")
    print(aligned([("what", "limit", "measured", "quartiles", ""), *(row.cells() for row in rows)]))
    if args.json:
        data = {"machine": host, "rows": [{**row._asdict(), "verdict": row.verdict} for row in rows]}
        Path(args.json).write_text(json.dumps(data) + "\n")
    return 1 if args.gate and any(row.verdict in ("short", "noisy") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
