"""Each rank of ``ddpstats demo`` averages what it holds in the plain way, and by `reduce_stats`.

That is by one all_reduce per value in the rank's own order of keys, and by `reduce_stats`, twice: in the first call the
ranks exchange what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddpstats import demo
from ddpstats._reduction.reducer import reduce_stats
from ddpstats.testing.faults import count_collectives


def measure_rank() -> demo.RankReport:
    """Return what this rank holds and gets. Collective over the default group."""
    inputs = demo.stats_of(dist.get_rank())
    stats = {key: [torch.tensor(value) for value in values] for key, values in inputs.items()}
    with count_collectives() as plain_count:
        plain = plain_average(stats, torch.tensor(demo.WEIGHT))
    with count_collectives() as first_count:
        reduce_stats(stats, demo.WEIGHT)
    with count_collectives() as later_count:
        reduced = reduce_stats(stats, demo.WEIGHT)
    counts = {"plain_all_reduce": plain_count, "ddpstats_first_call": first_count, "ddpstats": later_count}
    return {
        "rank": dist.get_rank(),
        "inputs": inputs,
        "plain_all_reduce": demo.flat(plain),
        "ddpstats": reduced.flat(),
        "collectives": {name: count.total for name, count in counts.items()},
        "worst": reduce_stats(stats, demo.WEIGHT, per_rank=True).flat_by_rank()[demo.ASKED].worst(2),
    }


def plain_average(stats: Mapping[str, Sequence[Tensor]], weight: Tensor) -> dict[str, list[float]]:
    """Return the weighted means over ranks as many trainers compute them: an all_reduce per value, and one more.

    Nothing in it says which value a rank is at: the n-th value of one rank is added to the n-th of every other. Where
    two ranks hold different keys, that is another key's. Source: espnet's ``recursive_average`` up to 202310.
    """
    sums = {key: [_all_reduced(value * weight) for value in values] for key, values in stats.items()}
    total = _all_reduced(weight)
    return {key: [(value / total).item() for value in values] for key, values in sums.items()}


def _all_reduced(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor
