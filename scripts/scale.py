"""What many ranks cost: counts of the real protocol, real ranks of this machine, and a model for more than there are.

    scripts/launch.sh dev python scripts/scale.py [--ranks 8,64,1024] [--real 2,8,64] [--json PATH] [--png PATH]

1. Counts, by the ranks of `_scale_counts`: for each phase what one rank sends, receives and asks of the store.
2. Real ranks (`_scale_ranks`): what it takes to connect so many by gloo, and the fastest all_reduce among two.
3. A model (`_scale_model`) with the constants of 2, for up to 100,000 ranks.

Nothing is random. The counts of collectives are exact; those of the store hold polls, so they differ a little from run
to run. Seconds are of a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _scale_counts as counts
import _scale_model as model
import _scale_ranks as real
from bench_rows import aligned

KEYS = 50
_COLUMNS = {
    "collectives": "collectives",
    "sent bytes": "sent_bytes",
    "received bytes": "received_bytes",
    "store requests": "requests",
    "keys in them": "keys",
    "store bytes": "store_bytes",
}


def phases_of(world_size: int) -> Iterator[counts.Phase]:
    """Everything that is counted, at one world size."""
    yield from counts.reductions(world_size, KEYS)
    yield counts.meeting(world_size)
    yield counts.waiting(world_size, looks=5)
    yield counts.missing(world_size, _timeout_sec(world_size))
    yield counts.missing_at_first_use(world_size, _timeout_sec(world_size))
    if world_size <= counts.MOST_ON_A_HOST:
        yield from counts.compared(world_size, hosts=False)
    yield from counts.compared(world_size, hosts=True)
    yield counts.guard_waiting(world_size, seconds=2.0)
    yield counts.guard_verdict(world_size)


def _timeout_sec(world_size: int) -> float:
    return 2.0 + world_size / 64  # so many threads take a while to begin


def counted_table(phases: Sequence[counts.Phase]) -> str:
    """A line per phase and world size: means over the ranks, and in brackets the rank that asks the store most."""
    lines: list[tuple[str, ...]] = [("per rank and call", "ranks", *_COLUMNS)]
    for phase in sorted(phases, key=lambda one: one.name):
        means = [f"{phase.per_rank(column):,.0f}" for column in _COLUMNS.values()]
        means[3] += f" ({phase.most('requests'):,.0f})"
        lines.append((phase.name, f"{phase.world_size:,}", *means))
    return aligned(lines)


def real_table(worlds: Sequence[real.World]) -> str:
    lines: list[tuple[str, ...]] = [
        ("ranks", "connect, s", "CPU, ms", "memory, KiB", "files", "fastest call, ms", "CPU of a call, ms")
    ]
    for world in worlds:
        one = world.median
        name = f"{world.world_size}{' in a grid' if world.grid else ''}"
        numbers = (f"{world.slowest_sec:.2f}", f"{one.connect_cpu_ms:.1f}", f"{one.private_kib:.0f}")
        lines.append((name, *numbers, f"{one.files:.0f}", f"{one.call_ms:.2f}", f"{one.call_cpu_ms:.2f}"))
    return aligned(lines)


def model_table(constants: model.Constants) -> str:
    sizes = (64, 1024, 4096, 100_000)
    columns = [model.predicted(size, constants) for size in sizes]
    lines: list[tuple[str, ...]] = [("model", *(f"{size:,} ranks" for size in sizes))]
    lines += [(name, *(f"{column[name]:,.3g}" for column in columns)) for name in columns[0]]
    return aligned(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scale", description="What many ranks cost: counted, measured, modelled.")
    parser.add_argument("--ranks", type=_numbers, default=(8, 64, 256, 1024), metavar="N,N", help="whom to count")
    parser.add_argument(
        "--real", type=_numbers, default=(2, 8, 16, 32, 64), metavar="N,N", help="processes; - for none"
    )
    parser.add_argument("--json", metavar="PATH", help="write everything")
    parser.add_argument("--png", metavar="PATH", help="draw it (needs matplotlib)")
    args = parser.parse_args(argv)
    phases: list[counts.Phase] = []
    for world_size in args.ranks:
        phases += phases_of(world_size)
        print(f"counted {world_size} ranks", file=sys.stderr)
    print(counted_table(phases))
    worlds = [real.measure(size, grid) for size in args.real for grid in (False, True)]
    constants = model.constants_of(worlds, phases, real.store_request_us()) if worlds else model.MEASURED
    if worlds:
        print("\n" + real_table(worlds))
    print("\n" + model_table(constants))
    if args.json:
        Path(args.json).write_text(json.dumps(_as_json(phases, worlds, constants), indent=1) + "\n")
    if args.png:
        model.draw(args.png, phases, constants)
    return 0


def _as_json(phases: Sequence[counts.Phase], worlds: Sequence[real.World], constants: model.Constants) -> Any:
    told = [
        {"phase": one.name, "ranks": one.world_size, "per_sec": one.requests_per_sec}
        | {column: one.per_rank(column) for column in _COLUMNS.values()}
        | {"most_requests": one.most("requests"), "most_keys": one.most("keys")}
        for one in phases
    ]
    return {"counted": told, "real": [asdict(world) for world in worlds], "constants": asdict(constants)}


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split(",")))


if __name__ == "__main__":
    raise SystemExit(main())
