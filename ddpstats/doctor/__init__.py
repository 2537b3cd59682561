"""``ddpstats doctor``: what differs between the ranks of a job, found before the job runs.

1. Each rank looks at itself: versions, libraries, environment. Then all ranks meet, and measure what lies between them
   (`ranks`): collectives, clocks, directory.
2. Rank 0 compares what all ranks report, and marks what differs and should not (`compare`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ddpstats._base import config
from ddpstats._base.text import count_of, holders_lines, print_report, shorten, stdout_to_stderr

# What a rank reports: sections of names and values, which are texts, or numbers of milliseconds.
Facts = dict[str, dict[str, Any]]

ALL_REDUCE = "all_reduce of 8 bytes"
CLOCK = "clock ahead of rank 0's"
DISTRIBUTIONS = "distributions"
EXISTS = "directory exists"
UNCONNECTED = "no connection"

_MOST_SKEW_MS = 100.0  # hosts that ask a time server are within some milliseconds of each other
_MOST_LINES = 16
_TIMEOUT_SEC = 120.0

EPILOG = """examples:
  torchrun --nproc-per-node 2 -m ddpstats doctor
  ddpstats doctor --json                      this process alone"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("--dir", default=".", help="should be one and the same to all ranks (default: where they run)")
    waiting = f"how long ranks wait for each other (default: {_TIMEOUT_SEC:g})"
    parser.add_argument("--timeout-sec", type=float, default=_TIMEOUT_SEC, metavar="S", help=waiting)


def run(args: argparse.Namespace) -> int:
    """Collective: every rank of the job must call. Only rank 0 prints, and has the exit status.

    Raises:
        RankMissing: a rank did not come, or is gone; on every living rank.
        ConfigError: RANK without the other variables that torchrun sets.
    """
    timeout_sec = config.timeout_sec(args.timeout_sec)
    with stdout_to_stderr():
        from ddpstats.doctor.ranks import examine  # imports torch, which `--help` need not

        by_rank = examine(Path(args.dir).absolute(), timeout_sec)
    if by_rank is None:
        return 0
    report = compare(by_rank)
    status = int(bool(report["differences"]))
    return print_report(status, args.json, lambda: as_text(report), lambda: report)


# -- what differs -----------------------------------------------------------------------------------------------------


def compare(by_rank: Sequence[Facts]) -> dict[str, Any]:
    """Return the report for programs: under section and name "marked", and "value" or, of each rank, "by_rank"."""
    report: dict[str, Any] = {"world_size": len(by_rank), "differences": []}
    for section in dict.fromkeys(chain(*by_rank)):
        held, report[section] = [facts.get(section, {}) for facts in by_rank], {}
        for name in dict.fromkeys(chain(*held)):
            values = [facts.get(name) for facts in held]
            is_marked, is_same = _is_wrong(name, values), len(set(values)) == 1
            report[section][name] = {"marked": is_marked, **({"value": values[0]} if is_same else {"by_rank": values})}
            report["differences"] += [f"{section}: {name}"] if is_marked else []
    return report


def _is_wrong(name: str, values: list[Any]) -> bool:
    if name == CLOCK:
        return any(abs(value) > _MOST_SKEW_MS for value in values)
    if name in (EXISTS, UNCONNECTED):
        return set(values) != {"yes"}
    may_differ = name in ("host", ALL_REDUCE) or name.endswith("_VISIBLE_DEVICES")
    return not may_differ and len(set(values)) > 1


def as_text(report: dict[str, Any]) -> str:
    """Return the report for people."""
    ranks, differences = report["world_size"], report["differences"]
    lines = [f"{count_of(ranks, 'ranks')}. What differs between them, and should not, has a ! before it."]
    for section in list(report)[2:]:
        shown = {name: row for name, row in report[section].items() if row["marked"] or section != DISTRIBUTIONS}
        hidden = len(report[section]) - len(shown)
        lines += ["", section, *chain(*map(_lines, shown, shown.values()))]
        lines += [f"    {hidden} more, which do not differ: --json has them"] if hidden else []
    if ranks == 1:
        last = "To compare ranks: torchrun --nproc-per-node 2 -m ddpstats doctor"
    elif differences:
        last = f"{count_of(len(differences), 'differences')}: {shorten(differences, _MOST_LINES)}"
    else:
        last = "Nothing differs."
    return "\n".join([*lines, "", last])


def _lines(name: str, row: dict[str, Any]) -> list[str]:
    start = f"  {'!' if row['marked'] else ' '} {name}"
    texts = list(map(_text, row.get("by_rank", [row.get("value")])))
    if len(set(texts)) == 1:
        return [f"{start}: {texts[0]}"]
    lines = holders_lines(dict(enumerate(texts)))
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more; --json has all"]
    return [start, *(f"    {line}" for line in lines)]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f} ms"
    return "not there" if value is None else value if value.isprintable() else repr(value)
