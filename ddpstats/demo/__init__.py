"""``ddpstats demo``: a per-value all_reduce that reports a negative L1 loss, and `reduce_stats` that does not.

1. `run_ranks` starts the ranks on this machine. Every even rank holds one batch, every odd rank another, with other
   numbers of values under the same keys; what each does with it is in `ranks`.
2. A table shows the true means, computed in plain Python, beside what the ranks got.

Source of the batches: the story of a training log whose L1 loss was negative, since espnet's ``recursive_average``
issued one all_reduce per value.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ddpstats._base.text import print_report
from ddpstats.errors import DdpstatsError

WEIGHT = 8.0

Stats = Mapping[str, Sequence[float]]

# The stats of one rank, the averages over all ranks that it got, by name, and its number of collectives.
RankReport = Mapping[str, Any]

_BATCHES: tuple[Stats, Stats] = (
    {"l1_loss": [0.057], "snr_loss": [-1.052, -3.037, -2.041]},
    {"l1_loss": [0.044, 0.023], "snr_loss": [-2.092, -1.899]},
)
ASKED = "snr_loss[1]"
_FLOAT32_TOLERANCE = 1e-6
_LIMIT_SEC = 90.0

EPILOG = """example:
  ddpstats demo --ranks 4"""
EXIT_STATUS = "0 it ran, 2 it could not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("--ranks", type=int, choices=range(2, 9), default=2, metavar="N", help="2 to 8 (default: 2)")


def run(args: argparse.Namespace) -> int:
    """Run the demo on processes of this machine, which are all gone when this returns or raises.

    Raises `DdpstatsError` if a rank failed, or ran for too long, or if ddpstats itself got a number wrong.
    """
    from ddpstats.demo.ranks import measure_rank  # import torch, which `--help` need not
    from ddpstats.testing import RankError, run_ranks

    try:
        # without the guard: the first half of the demo is what the guard stops
        reports = run_ranks(measure_rank, args.ranks, timeout_sec=_LIMIT_SEC, env={"DDPSTATS_GUARD": ""}).values()
    except RankError as error:
        raise DdpstatsError(f"the ranks could not run: {error}") from error
    report = report_of(reports)
    print_report(0, args.json, lambda: as_text(report), lambda: report)
    if not report["ok"]:
        raise DdpstatsError("ddpstats got a number wrong here, which is a bug in ddpstats: please report it")
    return 0


# -- what is right ----------------------------------------------------------------------------------------------------


def stats_of(rank: int) -> Stats:
    """Return the stats of a rank, of weight `WEIGHT`. Each has four values, so that the plain way does not hang."""
    return _BATCHES[rank % len(_BATCHES)]


def flat(stats: Stats) -> dict[str, float]:
    """Return the values by their names in `Reduced.flat`: ``l1_loss[0]``."""
    return {f"{key}[{index}]": value for key, values in stats.items() for index, value in enumerate(values)}


def report_of(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return what ``--json`` prints.

    "true": the mean of each name over the ranks that hold it; all weigh the same. "ok": ddpstats gave every rank every
    true mean, and no more.
    """
    held = [flat(report["inputs"]) for report in reports]
    names = sorted({name for batch in held for name in batch})
    true = {name: fmean(batch[name] for batch in held if name in batch) for name in names}
    averages = [report["ddpstats"] for report in reports]
    has_names = all(of_rank.keys() == true.keys() for of_rank in averages)
    ok = has_names and all(_is_right(of_rank[name], true[name]) for of_rank in averages for name in names)
    return {"ranks": len(reports), "weight": WEIGHT, "true": true, "by_rank": list(reports), "ok": ok}


def _is_right(value: float, true: float) -> bool:
    return math.isclose(value, true, rel_tol=_FLOAT32_TOLERANCE)


# -- the report -------------------------------------------------------------------------------------------------------

_OTHERS = "Of the {} ranks, every other even one gets what rank 0 gets, every other odd one what rank 1 gets.\n\n"


def as_text(report: Mapping[str, Any]) -> str:
    """Return the text of the report: the premise, the table, what went wrong, what it cost, the fix."""
    ranks, (first, second) = report["ranks"], report["by_rank"][:2]
    even, odd = ("rank 0", "rank 1") if ranks == 2 else ("each even rank", "each odd rank")
    others = "" if ranks == 2 else _OTHERS.format(ranks)
    calls = first["collectives"]
    at_first = calls["ddpstats_first_call"]
    return f"""\
Ranks average their losses, each with weight {report["weight"]:g}. An L1 loss is never negative.
  {even} holds {json.dumps(first["inputs"])}
  {odd} holds {json.dumps(second["inputs"])}

{_table(report["true"], [first, second])}

{others}\
Nothing failed, for all ranks made the same number of calls. But an all_reduce knows no names: the second
one added snr_loss[0] of rank 0 to l1_loss[1] of rank 1.

Collectives for one set of averages:
  plain all_reduce  {calls["plain_all_reduce"]}: one for each value, and one for the weight
  ddpstats          {calls["ddpstats"]}, and {at_first} the first time, when the ranks exchange what they hold

Which rank was it? With per_rank=True, farthest from the median of {ASKED}:
  {", ".join(f"rank {rank:.0f} with {value:.4f}" for rank, value in first["worst"])}

The fix:

    import ddpstats
    averages = ddpstats.reduce_stats(stats, weight).values"""


def _table(true: Mapping[str, float], reports: Sequence[RankReport]) -> str:
    averages = [report["plain_all_reduce"] for report in reports] + [report["ddpstats"] for report in reports]
    ranks = [f" rank {report['rank']}" for report in reports]
    blanks = [""] * (len(ranks) - 1)
    rows = [["", " true", " plain all_reduce", *blanks, " ddpstats", *blanks], ["", "", *ranks, *ranks]]
    for name, value in true.items():
        rows.append([name, f"{value: .4f}", *(_cell(of_rank.get(name), value) for of_rank in averages)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: float | None, true: float) -> str:
    return " -" if value is None else f"{value: .4f}" + " <- wrong" * (not _is_right(value, true))
