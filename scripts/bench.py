"""Speed and memory of reductions, as ratios within one run.

    scripts/launch.sh bench [--quick] [--gate] [--json PATH] [--png PATH]

1. For each world size and number of keys: fresh gloo ranks on this machine, one thread each, on which every variant is
   checked and then timed in turns with the others (`bench_reduction`, `_bench_loop`). Fresh, for the buffer of a group
   has the size of the largest layout that the group has seen.
2. Payload, memory and import are counted (`_bench_costs`).
3. A table on stdout, progress on stderr; JSON and a PNG where asked for.

The numbers are of this machine at this moment. While others use its cores, no ratio can be trusted, good ones as little
as bad ones; where the rounds' quartiles show that, the verdict is "noisy".
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _bench_checks import STEP_MS as CHECKS_STEP_MS, checks_costs
from _bench_costs import import_cost, memory, payload_on_thread, payloads
from _bench_loop import Budget, Spread, Timings
from _bench_plot import draw
from _bench_sentinel import EXAMS, STEPS_MS as SENTINEL_STEPS_MS, WIDTH as SENTINEL_WIDTH, exam_memory, sentinel_costs
from _bench_window import add_costs, flush_costs
from bench_capture import STEPS_MS as CAPTURE_STEPS_MS, capture_costs, captured_peak
from bench_dump import MSPROBE_NAMES, SEQUENCES as DUMP_SEQUENCES, dump_costs, msprobe_costs
from bench_guard import BURST as GUARD_BURST, ddp_step_costs, guard_costs, label_costs, plain_costs
from bench_integrations import LIBRARIES, integration_costs
from bench_reduction import Measured, measure, new_keys
from bench_rows import GATED_WORLD, Findings, Row, rows_of, table, times_table

from ddpstats.testing import run_ranks, run_threads

_LIMIT_SEC = 240.0  # of one set of ranks: a hang ends here
_BUSY_LOAD = 0.7


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure, and how long."""

    key_counts: Mapping[int, Sequence[int]]  # world size -> numbers of keys
    gated: Budget  # of each of the two loops of a gated world size and number of keys
    reported: Budget  # of the others
    payload_worlds: Sequence[int]
    payload_keys: Sequence[int]  # the first is 0: the header
    payload_threads: int
    new_key_calls: int
    memory_keys: int
    imports: int
    window_rounds: int
    window: Budget  # of each number of keys
    window_keys: Sequence[int]
    guard_rounds: int
    guard_burst: int  # calls in one round
    capture: Budget  # of each length of a step
    capture_steps_ms: Sequence[int]
    capture_layers: int  # of 25 MiB, for its memory
    sentinel: Budget  # of each length of a step
    sentinel_steps_ms: Sequence[int]
    sentinel_width: int
    checks_step_ms: int
    checks_rounds: int
    dump: Budget
    dump_layers: int
    dump_sequences: int
    integration_rounds: int
    integrations: Sequence[str]


# Above it, what is not about the buffer is left out: one collective per leaf takes minutes at 100,000 keys.
ALL_VARIANTS_UP_TO = 1_000
CURVE_WORLD, CURVE_KEYS = 2, 50

FULL = Plan(
    key_counts={2: (10, 50, 1_000, 100_000), 3: (50,), 4: (10, 50, 1_000, 100_000)},
    gated=Budget(8.0, at_least=16),
    reported=Budget(3.0, at_least=6),
    payload_worlds=(2, 3, 4),
    payload_keys=(0, 10, 50, 1_000),
    payload_threads=64,
    new_key_calls=1_000,
    memory_keys=100_000,
    imports=15,
    window_rounds=40,
    window=Budget(8.0, at_least=16),
    window_keys=(10, 50),
    guard_rounds=40,
    guard_burst=GUARD_BURST,
    capture=Budget(40.0, at_least=30),
    capture_steps_ms=CAPTURE_STEPS_MS,
    capture_layers=16,
    sentinel=Budget(60.0, at_least=10),
    sentinel_steps_ms=SENTINEL_STEPS_MS,
    sentinel_width=SENTINEL_WIDTH,
    checks_step_ms=CHECKS_STEP_MS,
    checks_rounds=20,
    dump=Budget(60.0, at_least=6),
    dump_layers=4,
    dump_sequences=DUMP_SEQUENCES,
    integration_rounds=20,
    integrations=LIBRARIES,
)
_TWO_ROUNDS = Budget(0.0, at_least=2, at_most=2)
QUICK = Plan(
    key_counts={2: (10, 50)},
    gated=_TWO_ROUNDS,
    reported=_TWO_ROUNDS,
    payload_worlds=(2,),
    payload_keys=(0, 10, 50),
    payload_threads=8,
    new_key_calls=4,
    memory_keys=200,
    imports=2,
    window_rounds=2,
    window=_TWO_ROUNDS,
    window_keys=(10,),
    guard_rounds=2,
    guard_burst=4,
    capture=_TWO_ROUNDS,
    capture_steps_ms=(10,),
    capture_layers=2,
    sentinel=_TWO_ROUNDS,
    sentinel_steps_ms=(10,),
    sentinel_width=32,
    checks_step_ms=5,
    checks_rounds=2,
    dump=_TWO_ROUNDS,
    dump_layers=1,
    dump_sequences=1,
    integration_rounds=2,
    integrations=("torcheval",),
)


class Progress:
    """A line per section on stderr."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"bench [{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)


def run(plan: Plan, say: Progress) -> Findings:
    """Measure everything; the long part."""
    found = Findings(payload_keys=plan.payload_keys)
    for world_size, key_counts in plan.key_counts.items():
        for keys in key_counts:
            say(f"{world_size} ranks, {keys:,} keys")
            budget = plan.gated if world_size == GATED_WORLD else plan.reported
            found.timed.append(_on_ranks(measure, world_size, keys, budget, keys <= ALL_VARIANTS_UP_TO))
    say(f"new keys in each of {plan.new_key_calls:,} calls")
    found.new_keys = {keys: _on_ranks(new_keys, 2, plan.new_key_calls, keys) for keys in (1, 10)}
    _count_payloads(plan, found, say)
    say(f"memory, 2 ranks, {plan.memory_keys:,} keys")
    found.memory = plan.memory_keys, _on_ranks(memory, 2, plan.memory_keys)
    say("window")
    found.window_adds = _on_ranks(add_costs, 1, plan.window_rounds)
    found.window_flushes = {keys: _on_ranks(flush_costs, 2, keys, plan.window) for keys in plan.window_keys}
    say("guard")
    found.guard = _on_ranks(guard_costs, 2, plan.guard_rounds, plan.guard_burst)
    found.ddp_step = _on_ranks(ddp_step_costs, 2, max(2, plan.guard_rounds // 2))
    found.labels = label_costs(max(4, plan.guard_rounds))
    for name, env in (("plain", {}), ("DETAIL", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})):
        outcomes = run_ranks(plain_costs, 2, plan.guard_rounds, timeout_sec=_LIMIT_SEC, env=env)
        found.detail[name] = outcomes.values()[0]
    say("capture")
    found.capture = {step_ms: _on_ranks(capture_costs, 2, step_ms, plan.capture) for step_ms in plan.capture_steps_ms}
    peaks = [_on_ranks(captured_peak, 1, plan.capture_layers, is_captured) for is_captured in (False, True)]
    found.capture_memory = peaks[1] - peaks[0]
    say("sentinel")
    found.sentinel = {
        step_ms: _on_ranks(sentinel_costs, 2, step_ms, plan.sentinel_width, plan.sentinel)
        for step_ms in plan.sentinel_steps_ms
    }
    memory_width = 8 * plan.sentinel_width
    found.exam_memory = {layer: _on_ranks(exam_memory, 1, layer, memory_width) for layer in EXAMS}
    say("all checks together")
    found.checks = _on_ranks(checks_costs, 2, plan.checks_step_ms, plan.checks_rounds)
    say("dump")
    sizes = plan.dump_layers, plan.dump_sequences
    found.dump = _on_ranks(dump_costs, 1, *sizes, plan.dump)
    found.msprobe = {name: _on_ranks(msprobe_costs, 1, name, *sizes, plan.dump) for name in MSPROBE_NAMES}
    for library in plan.integrations:
        say(library)
        costs = _on_ranks(integration_costs, 2, library, plan.integration_rounds)
        if costs is not None:
            found.integrations[library] = costs
    say(f"import, {plan.imports} times")
    found.imported = import_cost(plan.imports)
    say("done")
    return found


def _count_payloads(plan: Plan, found: Findings, say: Progress) -> None:
    for world_size in plan.payload_worlds:
        say(f"payload, {world_size} ranks")
        found.payloads[f"{world_size} ranks"] = _on_ranks(payloads, world_size, plan.payload_keys)
    threads = plan.payload_threads
    say(f"payload, {threads} threads")
    found.payloads[f"{threads} threads"] = [
        run_threads(payload_on_thread, threads, keys, timeout_sec=_LIMIT_SEC).values()[0] for keys in plan.payload_keys
    ]


def _on_ranks(function: Any, world_size: int, *args: Any) -> Any:
    """Rank 0's answer."""
    return run_ranks(function, world_size, *args, timeout_sec=_LIMIT_SEC).values()[0]


# -- JSON -------------------------------------------------------------------------------------------------------------


def as_json(found: Findings, rows: Sequence[Row], machine: Mapping[str, Any], plan_name: str) -> dict[str, Any]:
    """Everything, as plain data; times are seconds."""
    return {
        "machine": dict(machine),
        "plan": plan_name,
        "rows": [{**_plain(row), "verdict": row.verdict} for row in rows],
        "timed": [_timed_json(one) for one in found.timed],
        "payload_bytes": {"keys": list(found.payload_keys), **found.payloads},
        "memory": {"keys": found.memory[0], **_plain(found.memory[1])} if found.memory else None,
        "guard_seconds": {
            size: {name: _plain(Spread.of(sample)) for name, sample in samples.items()}
            for size, samples in found.guard.items()
        },
        "integrations_seconds": {
            library: {name: _plain(Spread.of(sample)) for name, sample in samples.items()}
            for library, samples in found.integrations.items()
        },
        "import": _plain(found.imported) if found.imported else None,
    }


def _timed_json(measured: Measured) -> dict[str, Any]:
    def loop(timings: Timings) -> dict[str, Any]:
        return {name: _plain(Spread.of(sample)) for name, sample in timings.seconds.items()}

    return {
        "world_size": measured.world_size,
        "keys": measured.keys,
        "payload_bytes": measured.payload_bytes,
        "per_leaf": measured.per_leaf,
        "lean_seconds": loop(measured.lean),
        "against_leaves_seconds": loop(measured.against_leaves),
    }


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


# -- command line -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measure reductions, the guard and the integrations.")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds: its numbers mean little")
    parser.add_argument(
        "--gate", action="store_true", help="exit with 1 where a reach was missed, or noise hides whether it was"
    )
    parser.add_argument("--json", metavar="PATH", help="write everything that was measured")
    parser.add_argument("--png", metavar="PATH", help="draw time over keys and over ranks (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install 'ddpstats[bench]'")

    machine, say = _machine(), Progress()  # the load before we add to it
    if machine["load_average"] > _BUSY_LOAD:
        say(f"this machine is busy (load average {machine['load_average']:.1f}): ratios will be off")
    found = run(QUICK if args.quick else FULL, say)
    rows = rows_of(found)
    print(f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}, gloo")
    print(f"per leaf: {found.timed[0].per_leaf}\n\n{table(rows)}\n\n{times_table(found)}")
    if args.json:
        text = json.dumps(as_json(found, rows, machine, "quick" if args.quick else "full"), indent=1)
        Path(args.json).write_text(text + "\n")
    if args.png:
        draw(args.png, found.timed, CURVE_WORLD, CURVE_KEYS)
    return 1 if args.gate and any(row.verdict in ("short", "noisy") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
