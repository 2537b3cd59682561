"""Hurt one rank in every phase of what ddpstats does, and write down what the others raised, and when.

    scripts/launch.sh dev python scripts/faults.py RESULTS [--ranks 2 4] [--phase NAME ...] [--fault NAME ...]
    scripts/launch.sh dev python scripts/faults.py RESULTS --table docs/reliability.md

A line of JSON for each case goes into the file RESULTS; cases that stand there are not played again. With --table the
table between the markers of that page is written from it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from tests.faults.cases import play, shortfalls
from tests.faults.injuries import FAULTS, Case, cells
from tests.faults.phases import PHASES

_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--phase", nargs="+", default=list(PHASES), choices=list(PHASES))
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--timeout-sec", type=float, default=5.0)
    parser.add_argument("--late-sec", type=float, default=20.0)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        write_table(options.table, read(options.results))
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background has it ignored
    known = {_key(row["case"]) for row in read(options.results)}
    failed = 0
    for ranks in options.ranks:
        for case in cells(ranks, options.timeout_sec, options.late_sec):
            is_chosen = case.phase in options.phase and case.fault in options.fault
            if is_chosen and _key(asdict(case)) not in known:
                failed += not _play(case, options.results)
    return 1 if failed else 0


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _key(case: dict[str, Any]) -> tuple[Any, ...]:
    return case["phase"], case["fault"], case["ranks"]


def _play(case: Case, results: Path) -> bool:
    seen = play(case)
    amiss = shortfalls(case, seen)
    firsts = [rank and {**rank["first"], "left": rank["left"]} for rank in seen.ranks]
    after = seen.known_after_sec(case)
    with results.open("a") as file:
        row = {"case": asdict(case), "victim": case.victim, "after_sec": after, "amiss": amiss, "ranks": firsts}
        file.write(json.dumps(row) + "\n")
    print(f"{case.ranks} {case.fault:18} {case.phase:15} {after:6.1f} s  {'; '.join(amiss)[:600] or 'ok'}", flush=True)
    return not amiss


def write_table(page: Path, rows: list[dict[str, Any]]) -> None:
    """Phase by fault, with the seconds for each world size."""
    sizes = sorted({row["case"]["ranks"] for row in rows})
    cells = {_key(row["case"]): _cell(row) for row in rows}
    lines = ["| | " + " | ".join(fault.words for fault in FAULTS.values()) + " |", "|---" * (len(FAULTS) + 1) + "|"]
    for name, phase in PHASES.items():
        row = [" / ".join(cells.get((name, fault, size), "-") for size in sizes) for fault in FAULTS]
        lines.append(f"| {phase.words} | " + " | ".join(row) + " |")
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text("\n".join([f"{before}{_BEGIN}", "", *lines, "", f"{_END}{rest.partition(_END)[2]}"]))


def _cell(row: dict[str, Any]) -> str:
    missed = any(rank and rank["raised"] == "RankMissing" for rank in row["ranks"])
    text = f"{row['after_sec']:.1f}" if row["amiss"] or missed else "ok"
    return f"**{text}**" if row["amiss"] else text


if __name__ == "__main__":
    sys.exit(main())
