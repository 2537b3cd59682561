"""``ddpstats demo``: a per-value all_reduce that reports a negative L1 loss, and `reduce_stats` that does not.

1. Every even rank holds one batch, every odd rank another, with other numbers of values under the same keys.
2. `run_ranks` starts the ranks on this machine. Each averages what it holds, by one all_reduce per value in its own
   order of keys, and by `reduce_stats`, twice: in the first call the ranks exchange what they hold.
3. A table shows the true means, computed in plain Python, beside what the ranks got.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddpstats._base import config
from ddpstats._base.text import VerbReport
from ddpstats.demo.report import ASKED, WEIGHT, Collectives, RankReport, as_json, as_text, flat, is_right, stats_of
from ddpstats.errors import DdpstatsError

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANKS = 64

_LIMIT_SEC = 60.0
_LIMIT_PER_RANK_SEC = 3.0  # for sixty-four ranks on two cores

EPILOG = """example:
  ddpstats demo --ranks 4

exit status: 0 it ran, 2 it could not"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=_number_of_ranks, default=2, metavar="N", help=f"1 to {MAX_RANKS} processes (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    """Raises `DdpstatsError` if the ranks could not run, or if ddpstats itself got a number wrong."""
    reports = measure(args.ranks, _LIMIT_SEC + args.ranks * _LIMIT_PER_RANK_SEC)
    text = as_text(reports, colour=_wants_colour())
    VerbReport(0, lambda: text, lambda: as_json(reports), indent=2).show(args.json)
    if not is_right(reports):
        raise DdpstatsError("ddpstats got a number wrong here, which is a bug in ddpstats: please report it")
    return 0


def _number_of_ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_RANKS}")
    return int(text)


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def measure(ranks: int, limit_sec: float) -> list[RankReport]:
    """Run the demo on ``ranks`` processes, which are all gone when this returns or raises; the reports in rank order.

    Raises:
        DdpstatsError: a rank failed, or ran longer than ``limit_sec`` seconds; it names the rank and its error.
    """
    from ddpstats.testing import RankError, run_ranks  # import torch, which `--help` need not

    try:
        # without the guard: the first half of the demo is what the guard stops
        return run_ranks(measure_rank, ranks, timeout_sec=limit_sec, env={config.GUARD: ""}).values()
    except RankError as error:
        raise DdpstatsError(f"the ranks could not run: {error}") from error


# -- on each rank -----------------------------------------------------------------------------------------------------


def measure_rank() -> RankReport:
    """Return what this rank holds and gets. Collective over the default group."""
    import torch
    import torch.distributed as dist

    from ddpstats._reduction.reducer import reduce_stats
    from ddpstats.testing.faults import count_collectives

    inputs = stats_of(dist.get_rank())
    stats = {key: [torch.tensor(value) for value in values] for key, values in inputs.items()}
    with count_collectives() as plain_count:
        plain = plain_average(stats, torch.tensor(WEIGHT))
    with count_collectives() as first_count:
        reduce_stats(stats, WEIGHT)
    with count_collectives() as later_count:
        reduced = reduce_stats(stats, WEIGHT)
    collectives = Collectives(plain_count.total, first_count.total, later_count.total)
    worst = reduce_stats(stats, WEIGHT, per_rank=True).flat_by_rank()[ASKED].worst(2)
    return RankReport(dist.get_rank(), inputs, flat(plain), reduced.flat(), collectives, worst)


def plain_average(stats: Mapping[str, Sequence[Tensor]], weight: Tensor) -> dict[str, list[float]]:
    """Return the weighted means over ranks as many trainers compute them: an all_reduce per value, and one more.

    Nothing in it says which value a rank is at: the n-th value of one rank is added to the n-th of every other. Where
    two ranks hold different keys, that is another key's. Source: espnet's ``recursive_average`` up to 202310.
    """
    sums = {key: [_all_reduced(value * weight) for value in values] for key, values in stats.items()}
    total = _all_reduced(weight)
    return {key: [(value / total).item() for value in values] for key, values in sums.items()}


def _all_reduced(tensor: Tensor) -> Tensor:
    import torch.distributed as dist

    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor
