"""One rank of ``ddpstats demo``: average what it holds, the plain way and with ddpstats, and write down what came out.

1. Watch stdin, a pipe that only the parent of all ranks holds open: when it closes, this process ends.
2. Average by one plain all_reduce per value, in this rank's own order of keys.
3. Average by `reduce_stats`, twice: the first call is the one in which the ranks tell each other what they hold.
4. Ask which ranks are farthest from the median of one value.
5. Write a `RankReport` as JSON.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ddpstats._reduction.reducer import reduce_stats
from ddpstats.demo.report import ASKED, WEIGHT, Collectives, RankReport, flat, report_name, stats_of
from ddpstats.testing._faults import count_collectives

_GLOO_TIMEOUT = datetime.timedelta(seconds=60)

_Stats = Mapping[str, Sequence[torch.Tensor]]


def main(directory: str) -> None:
    """Join the default gloo group that torchrun describes in the environment, and write this rank's report."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    dist.init_process_group("gloo", timeout=_GLOO_TIMEOUT)
    report = _measure(dist.get_rank())
    Path(directory, report_name(report.rank)).write_text(report.to_json())
    dist.destroy_process_group()


def plain_average(stats: _Stats, weight: torch.Tensor) -> dict[str, list[float]]:
    """The weighted means over ranks, as many trainers compute them. Collective: an all_reduce per value, and one more.

    Nothing in it says which value a rank is at: the n-th value of one rank is added to the n-th of every other. Where
    two ranks hold different keys, that is another key's. Source: espnet's ``recursive_average`` up to 202310, retold.
    """
    sums = {key: [_summed(value * weight) for value in values] for key, values in stats.items()}
    total = _summed(weight)
    return {key: [(value / total).item() for value in values] for key, values in sums.items()}


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def _measure(rank: int) -> RankReport:
    inputs = stats_of(rank)
    stats = {key: [torch.tensor(value) for value in values] for key, values in inputs.items()}
    with count_collectives() as plain_count:
        plain = plain_average(stats, torch.tensor(WEIGHT))
    with count_collectives() as first_count:
        reduce_stats(stats, WEIGHT)
    with count_collectives() as later_count:
        reduced = reduce_stats(stats, WEIGHT)
    collectives = Collectives(plain_count.total, first_count.total, later_count.total)
    worst = reduce_stats(stats, WEIGHT, per_rank=True).flat_by_rank()[ASKED].worst(2)
    return RankReport(rank, inputs, flat(plain), reduced.flat(), collectives, worst)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    faulthandler.dump_traceback()  # to stderr, which the parent shows if it gave up on this rank
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
