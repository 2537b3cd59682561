"""Run the corpus of programs that labels are measured on, on two gloo ranks, and write the table of how they end.

    scripts/launch.sh dev python scripts/guard_corpus.py docs/guard-labels.md
    scripts/launch.sh dev python scripts/guard_corpus.py --check
    scripts/launch.sh dev python scripts/guard_corpus.py --only faulty/espnet_nested_speakers

The first replaces the text between the two markers in the file. ``--check`` runs every program without a guard, and
exits with 1 where one fails, or is not faulty or legal as its folder says. ``--only`` prints what the guard says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import label_corpus as corpus
from ddpstats.testing import RankPool

_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?", help="the document whose measured part is written")
    parser.add_argument("--check", action="store_true", help="see that each program is what its folder says")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="print what the guard says of these programs")
    asked = parser.parse_args()
    chosen = corpus.programs()
    with RankPool(2) as pool, tempfile.TemporaryDirectory() as copies:
        if asked.check:
            return _check(pool, chosen)
        if asked.only:
            _print(pool, [program for program in chosen if program.name in asked.only])
            return 0
        started = time.monotonic()
        lines = corpus.table(chosen, corpus.all_outcomes(pool, chosen, Path(copies)))
        print(f"{len(chosen)} programs, four ways, in {time.monotonic() - started:.1f} s", file=sys.stderr)
    if asked.target is None:
        print("\n".join(lines))
    else:
        _write(asked.target, lines)
    return 0


def _check(pool: RankPool, chosen: list[corpus.Program]) -> int:
    faults = corpus.unsound(pool, chosen)
    print("\n".join(faults) or f"{len(chosen)} programs are what their folders say")
    return 1 if faults else 0


def _print(pool: RankPool, chosen: list[corpus.Program]) -> None:
    for mode in corpus.MODES:
        by_rank = pool.run(corpus.play, [str(program.path) for program in chosen], mode, timeout_sec=120).values()
        for number, program in enumerate(chosen):
            for rank, ends in enumerate(by_rank):
                end, messages = ends[number]
                print(f"== {program.name}, {mode}, rank {rank}: {end}\n{messages or ''}")


def _write(target: Path, lines: list[str]) -> None:
    head, _, rest = target.read_text().partition(_BEGIN)
    tail = rest.partition(_END)[2]
    target.write_text("\n".join([head + _BEGIN, *lines, _END + tail]))


if __name__ == "__main__":
    sys.exit(main())
