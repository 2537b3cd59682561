"""The batches of ``ddpstats demo``, the right averages of them, and the text about what the ranks got.

Source of the batches: the story of a training log whose L1 loss was negative, since espnet's ``recursive_average``
issued one all_reduce per value.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

WEIGHT = 8.0

Stats = Mapping[str, Sequence[float]]

_BATCHES: tuple[Stats, Stats] = (
    {"l1_loss": [0.057], "snr_loss": [-1.052, -3.037, -2.041]},
    {"l1_loss": [0.044, 0.023], "snr_loss": [-2.092, -1.899]},
)
ASKED = "snr_loss[1]"
_FLOAT32_TOLERANCE = 1e-6
_FIX = """\
The fix:

    import ddpstats
    averages = ddpstats.reduce_stats(stats, weight).values"""


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The number of collectives that a rank issued to average its stats once."""

    plain_all_reduce: int
    ddpstats_first_call: int
    ddpstats: int


@dataclasses.dataclass(frozen=True)
class RankReport:
    """The stats of one rank, and the averages over all ranks that it got, by name."""

    rank: int
    inputs: Stats
    plain_all_reduce: Mapping[str, float]
    ddpstats: Mapping[str, float]
    collectives: Collectives
    worst: Sequence[Sequence[float]]
    """Which ranks are farthest from the median of `ASKED`, and what they hold."""


def stats_of(rank: int) -> Stats:
    """Return the stats of a rank, of weight `WEIGHT`. Each has four values, so that the plain way does not hang."""
    return _BATCHES[rank % len(_BATCHES)]


def flat(stats: Stats) -> dict[str, float]:
    """Return the values by their names in `Reduced.flat`: ``l1_loss[0]``."""
    return {f"{key}[{index}]": value for key, values in stats.items() for index, value in enumerate(values)}


def true_means(reports: Sequence[RankReport]) -> dict[str, float]:
    """Return the mean of each name over the ranks that hold it; all weigh the same."""
    held = [flat(report.inputs) for report in reports]
    names = sorted({name for batch in held for name in batch})
    return {name: fmean(batch[name] for batch in held if name in batch) for name in names}


def is_right(reports: Sequence[RankReport]) -> bool:
    """Return whether ddpstats gave every rank every true mean, and no more."""
    true = true_means(reports)
    return all(
        report.ddpstats.keys() == true.keys() and not any(_is_wrong(report.ddpstats[name], true[name]) for name in true)
        for report in reports
    )


def as_json(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "ranks": len(reports),
        "weight": WEIGHT,
        "true": true_means(reports),
        "by_rank": [dataclasses.asdict(report) for report in reports],
        "ok": is_right(reports),
    }


def as_text(reports: Sequence[RankReport], *, colour: bool) -> str:
    """Return the text of the report: the premise, the table, what went wrong, what it cost, the fix."""
    paragraphs = [
        _premise(reports),
        _table(true_means(reports), reports[:2]),
        _others(len(reports)),
        _story(reports),
        _cost(reports[0].collectives),
        _worst(reports[0].worst),
        _FIX,
    ]
    text = "\n\n".join(filter(None, paragraphs))
    return re.sub(r"\S+ <- wrong", r"\033[31m\g<0>\033[0m", text) if colour else text  # in red


# -- paragraphs -------------------------------------------------------------------------------------------------------


def _premise(reports: Sequence[RankReport]) -> str:
    names = ("rank 0", "rank 1") if len(reports) <= 2 else ("each even rank", "each odd rank")
    held = [f"  {name} holds {json.dumps(report.inputs)}" for name, report in zip(names, reports, strict=False)]
    return "\n".join([f"Ranks average their losses, each with weight {WEIGHT:g}. An L1 loss is never negative.", *held])


def _others(ranks: int) -> str:
    if ranks <= 2:
        return ""
    return f"Of the {ranks} ranks, every other even one gets what rank 0 gets, every other odd one what rank 1 gets."


def _story(reports: Sequence[RankReport]) -> str:
    if len(reports) == 1:
        return "A single rank has nothing to mix up: both are right. Try --ranks 2."
    return (
        "Nothing failed, for all ranks made the same number of calls. But an all_reduce knows no names: the second\n"
        "one added snr_loss[0] of rank 0 to l1_loss[1] of rank 1."
    )


def _cost(collectives: Collectives) -> str:
    plain, first, later = dataclasses.astuple(collectives)
    lines = [
        "Collectives for one set of averages:",
        f"  plain all_reduce  {plain}: one for each value, and one for the weight",
        f"  ddpstats          {later}"
        + f", and {first} the first time, when the ranks tell each other what they hold" * (first != later),
    ]
    return "\n".join(lines)


def _worst(worst: Sequence[Sequence[float]]) -> str:
    if len(worst) < 2:
        return ""
    held = ", ".join(f"rank {rank:.0f} with {value:.4f}" for rank, value in worst)
    return f"Which rank was it? With per_rank=True, farthest from the median of {ASKED}:\n  {held}"


# -- the table --------------------------------------------------------------------------------------------------------


def _table(true: Mapping[str, float], reports: Sequence[RankReport]) -> str:
    ways = [report.plain_all_reduce for report in reports] + [report.ddpstats for report in reports]
    ranks = [f" rank {report.rank}" for report in reports]
    blanks = [""] * (len(ranks) - 1)
    rows = [["", " true", " plain all_reduce", *blanks, " ddpstats", *blanks], ["", "", *ranks, *ranks]]
    for name, value in true.items():
        rows.append([name, f"{value: .4f}", *(_cell(way.get(name), value) for way in ways)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: float | None, true: float) -> str:
    return " -" if value is None else f"{value: .4f}" + " <- wrong" * _is_wrong(value, true)


def _is_wrong(value: float, true: float) -> bool:
    return not math.isclose(value, true, rel_tol=_FLOAT32_TOLERANCE)
