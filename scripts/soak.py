"""Ranks reduce, flush windows and train under all that watches, for as long as you like. Does anything grow?

    scripts/launch.sh dev python scripts/soak.py [--minutes 60] [--ranks 4] [--seed 0]

1. In each round every rank reduces random stats and flushes a window of random adds; in some rounds ranks disagree, a
   process group comes and goes, or a model trains with guard, capture, sentinel, window and dump, one step with a NaN.
2. Every result is compared with the oracle of the tests (fractions), on one rank in turn, and is the same on all ranks.
3. After some rounds each rank reports its memory, threads, open files, process groups, hooks and shared memory. Of the
   second half of these samples, the median of its later half may not lie above that of its earlier half, by more than a
   bound: `BOUNDS`.

Exit status: 0 all well, 1 a wrong result or something that grew, both of which are named.
"""

from __future__ import annotations

import argparse
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

from soak_rounds import QUANTITIES, RankReport, rounds

from ddpstats.testing import RankPool

BOUNDS = {"memory": 2.0, "threads": 0.5, "files": 0.5, "groups": 0.5, "hooks": 0.5, "shared memory": 0.5}
"""Memory in MiB; all others counted."""
_LEAST = 20
"""Samples: fewer say nothing, for the warm-up is not over."""


@dataclass
class Soaked:
    """The outcome of a soak. ``samples``: (seconds since the start, rounds until then, what each rank holds)."""

    samples: list[tuple[float, int, list[dict[str, float]]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


def soak(
    minutes: float, ranks: int, seed: int, most_rounds: int = 10**9, at_once: int = 10, leak: Sequence[str] = ()
) -> Soaked:
    """Run until the minutes are over and enough samples taken (a busy machine gives few), or so many rounds."""
    soaked, number, started = Soaked(), 0, time.monotonic()
    with RankPool(ranks, timeout_sec=600) as pool, tempfile.TemporaryDirectory() as directory:
        while number < most_rounds and (time.monotonic() - started < 60 * minutes or len(soaked.samples) < _LEAST):
            played = range(number, number + at_once)
            reports = pool.run(rounds, seed, played, directory, leak).values()
            number = played.stop
            _add(soaked, reports, time.monotonic() - started, played)
            for bundle in Path(directory).iterdir():
                shutil.rmtree(bundle)
    return soaked


def _add(soaked: Soaked, reports: Sequence[RankReport], seconds: float, played: range) -> None:
    soaked.samples.append((seconds, played.stop, [report.holds for report in reports]))
    soaked.wrong += [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report.wrong]
    if any(report.digests != reports[0].digests for report in reports):
        soaked.wrong.append(f"ranks have other results in rounds {played[0]} to {played[-1]}")
    soaked.done.update(reports[0].done)


def grown(samples: Sequence[tuple[float, int, Sequence[dict[str, float]]]], memory_mib: float) -> list[str]:
    """Return a line for each quantity of a rank that is not flat."""
    second = samples[len(samples) // 2 :]
    earlier, later = second[: len(second) // 2], second[len(second) // 2 :]
    if len(earlier) < 2:
        return [f"{len(samples)} samples are too few to say that anything is flat"]
    lines = []
    for quantity, bound in {**BOUNDS, "memory": memory_mib}.items():
        for rank in range(len(samples[0][2])):
            before, after = (statistics.median(held[rank][quantity] for *_, held in part) for part in (earlier, later))
            if after - before > bound:
                lines.append(f"{quantity} of rank {rank}: {before:,.1f}, then {after:,.1f}")
    return lines


def report(soaked: Soaked, memory_mib: float) -> list[str]:
    """Print what was done, and what each rank held at half time and at the end; return what is wrong."""
    seconds, number, last = soaked.samples[-1]
    _, _, middle = soaked.samples[len(soaked.samples) // 2]
    done = ", ".join(f"{count:,} {what}" for what, count in soaked.done.items())
    print(f"{seconds / 60:.1f} minutes, {len(last)} ranks, {number:,} rounds: {done}")
    for quantity in QUANTITIES:
        spans = [f"{old[quantity]:,.1f} -> {new[quantity]:,.1f}" for old, new in zip(middle, last, strict=True)]
        print(f"  {quantity}, at half time and at the end, by rank: {'; '.join(spans)}")
    return [*soaked.wrong, *grown(soaked.samples, memory_mib)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10**9, help="end after so many, if that is sooner")
    parser.add_argument("--memory-mib", type=float, default=BOUNDS["memory"], help="how much a rank may grow")
    parser.add_argument("--leak", action="append", default=[], choices=QUANTITIES, help="on purpose, to see it found")
    args = parser.parse_args()
    soaked = soak(args.minutes, args.ranks, args.seed, args.rounds, leak=args.leak)
    wrong = report(soaked, args.memory_mib)
    print("\n".join(["WRONG:", *wrong]) if wrong else "all results right, nothing grew")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
