"""Soak: ranks reduce, flush windows and train under all that watches, for as long as you like; does anything grow?

    scripts/launch.sh dev python scripts/soak.py [--minutes 60] [--ranks 4] [--seed 0] [--png PATH] [--json PATH]

1. In each round every rank reduces random stats and flushes a window of random adds; in some rounds ranks disagree, a
   process group comes and goes, or a model trains with guard, capture, sentinel, window and dump, one step with a NaN.
2. Every result is compared with the oracle of the tests (fractions), on one rank in turn, and is the same on all ranks.
3. After some rounds each rank tells its memory, threads, open files, process groups, hooks and shared memory. Of the
   second half of these samples, the median of its later half may not lie above that of its earlier half, by more than a
   bound: `BOUNDS`.

Exit status: 0 all well, 1 a wrong result or something that grew, both of which are named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' oracle

from soak_rounds import QUANTITIES, Told, rounds

from ddpstats.testing import RankPool

BOUNDS = {"memory": 2.0, "threads": 0.5, "files": 0.5, "groups": 0.5, "hooks": 0.5, "shared memory": 0.5}
"""Memory in MiB; all others counted."""
_AT_ONCE = 10
_LEAST = 20
"""Samples: of fewer nothing can be said, and what warms up is not over."""


@dataclass
class Soaked:
    """``samples``: (seconds since the start, rounds until then, by rank what it holds)."""

    samples: list[tuple[float, int, list[dict[str, float]]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


def soak(
    minutes: float, ranks: int, seed: int, most_rounds: int = 10**9, at_once: int = _AT_ONCE, leak: Sequence[str] = ()
) -> Soaked:
    """Until the minutes are over and enough samples taken (a busy machine gives few), or so many rounds are done."""
    soaked, number, started = Soaked(), 0, time.monotonic()
    with RankPool(ranks, timeout_sec=600) as pool, tempfile.TemporaryDirectory() as directory:
        while number < most_rounds and (time.monotonic() - started < 60 * minutes or len(soaked.samples) < _LEAST):
            told = pool.run(rounds, seed, range(number, number + at_once), directory, leak).values()
            number += at_once
            _add(soaked, told, time.monotonic() - started, range(number - at_once, number))
            for one in Path(directory).iterdir():
                shutil.rmtree(one)
    return soaked


def _add(soaked: Soaked, told: Sequence[Told], seconds: float, played: range) -> None:
    soaked.samples.append((seconds, played.stop, [one.holds for one in told]))
    soaked.wrong += [f"rank {rank}: {text}" for rank, one in enumerate(told) for text in one.wrong]
    if any(one.digests != told[0].digests for one in told):
        soaked.wrong.append(f"ranks have other results in rounds {played[0]} to {played[-1]}")
    soaked.done.update(told[0].done)


def grown(samples: Sequence[tuple[float, int, Sequence[dict[str, float]]]], memory_mib: float) -> list[str]:
    """What is not flat, a line each."""
    second = samples[len(samples) // 2 :]
    earlier, later = second[: len(second) // 2], second[len(second) // 2 :]
    if len(earlier) < 2:
        return [f"{len(samples)} samples are too few to say that anything is flat"]
    said = []
    for quantity, bound in {**BOUNDS, "memory": memory_mib}.items():
        for rank in range(len(samples[0][2])):
            before, after = (statistics.median(held[rank][quantity] for *_, held in part) for part in (earlier, later))
            if after - before > bound:
                said.append(f"{quantity} of rank {rank}: {before:,.1f}, then {after:,.1f}")
    return said


def draw(path: str, soaked: Soaked) -> None:
    """A panel per quantity, a line per rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(11, 5.5), dpi=130, layout="constrained", sharex=True)
    minutes = [seconds / 60 for seconds, *_ in soaked.samples]
    for panel, quantity in zip(panels.flat, QUANTITIES, strict=True):
        for rank in range(len(soaked.samples[0][2])):
            held = [holds[rank][quantity] for *_, holds in soaked.samples]
            panel.plot(minutes, held, lw=1.5, alpha=0.8, label=f"rank {rank}")
        panel.set(title=quantity + (" (MiB)" if quantity == "memory" else ""), ylim=(0, None))
        panel.grid(True, alpha=0.3)
    for panel in panels[-1]:
        panel.set(xlabel="minutes")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def report(soaked: Soaked, memory_mib: float) -> list[str]:
    """Prints what was done and what each rank held at the half and at the end; returns what is wrong."""
    seconds, number, last = soaked.samples[-1]
    _, _, middle = soaked.samples[len(soaked.samples) // 2]
    done = ", ".join(f"{count:,} {what}" for what, count in soaked.done.items())
    print(f"{seconds / 60:.1f} minutes, {len(last)} ranks, {number:,} rounds: {done}")
    for quantity in QUANTITIES:
        spans = [f"{old[quantity]:,.1f} -> {new[quantity]:,.1f}" for old, new in zip(middle, last, strict=True)]
        print(f"  {quantity}, at half time and at the end, by rank: {'; '.join(spans)}")
    return [*soaked.wrong, *grown(soaked.samples, memory_mib)]


def main() -> int:
    """Soak, report, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10**9, help="end after so many, if that is sooner")
    parser.add_argument("--memory-mib", type=float, default=BOUNDS["memory"], help="how much a rank may grow")
    parser.add_argument("--leak", action="append", default=[], choices=QUANTITIES, help="on purpose, to see it found")
    parser.add_argument("--png", metavar="PATH", help="draw what ranks held over time (needs matplotlib)")
    parser.add_argument("--json", metavar="PATH", help="write the samples")
    args = parser.parse_args()
    soaked = soak(args.minutes, args.ranks, args.seed, args.rounds, leak=args.leak)
    if args.json:
        Path(args.json).write_text(json.dumps(soaked.samples))
    if args.png:
        draw(args.png, soaked)
    wrong = report(soaked, args.memory_mib)
    print("\n".join(["WRONG:", *wrong]) if wrong else "all results right, nothing grew")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
