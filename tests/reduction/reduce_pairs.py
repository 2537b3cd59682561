"""Random reductions against the oracle, on real ranks and on threads. A seed is at most `OF_A_SEED` reductions.

benchmarks/test_reduce_oracle.py takes many seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

import ddpstats
from ddpstats import StatsReducer
from ddpstats.errors import NonFiniteStat
from ddpstats.testing import RankPool, ThreadGroup, run_threads
from tests.reduction.oracle import expected_by_rank, same
from tests.reduction.window_pairs import Draw, Reduction, as_scalars, check, columns_of

Runner = Callable[[range], Sequence[Sequence[Any]]]
"""Reduces what the seeds draw; returns for each rank what `reduced` gives."""
OF_A_SEED = 12


def drawn_by(seed: int, ranks: int, count: int = OF_A_SEED) -> Iterator[Reduction]:
    return Draw(seed, tensors=0.5, wild=0.3).reductions(ranks, count)


@functools.lru_cache(maxsize=1)
def drawn_by_all(seeds: range, ranks: int) -> list[tuple[int, Reduction]]:
    """Return the (seed, reduction) of these seeds: they are drawn once for all threads."""
    return [(seed, drawn) for seed in seeds for drawn in drawn_by(seed, ranks)]


def on_this_rank(seeds: range, name: str) -> list[tuple[Any, Any]]:
    """Reduce with reducers that are kept: under one name they have layouts of all kinds."""
    return [one_on_this_rank(drawn, name) for _, drawn in drawn_by_all(seeds, dist.get_world_size())]


def one_on_this_rank(drawn: Reduction, name: str) -> tuple[Any, Any]:
    return reduced(functools.partial(ddpstats.reduce_stats, name=name), dist.get_rank(), drawn)


def on_this_thread(group: ThreadGroup, seeds: range) -> list[tuple[Any, Any]]:
    kept: dict[tuple[str, bool], StatsReducer] = {}

    def reduce(stats: Any, weight: Any, nonfinite: Any, per_rank: bool) -> ddpstats.Reduced:
        if (nonfinite, per_rank) not in kept:
            kept[nonfinite, per_rank] = group.reducer(nonfinite=nonfinite, per_rank=per_rank, timeout_sec=60)
        return kept[nonfinite, per_rank](stats, weight)

    return [reduced(reduce, group.rank, drawn) for _, drawn in drawn_by_all(seeds, group.world_size)]


def reduced(reduce: Callable[..., ddpstats.Reduced], rank: int, drawn: Reduction) -> tuple[Any, Any]:
    """Return the result or the error's text, and the values of single ranks."""
    policy, per_rank, adds = drawn
    stats, weight = adds[rank]
    try:
        answer = reduce(stats, weight, nonfinite=policy, per_rank=per_rank)
    except NonFiniteStat as error:
        return str(error), None
    return columns_of(answer), _unwrapped(answer.by_rank)


def _unwrapped(nested: Any) -> Any:
    if isinstance(nested, ddpstats.RankValues):
        return tuple(nested.values)
    if isinstance(nested, dict):
        return type(nested)((key, _unwrapped(value)) for key, value in nested.items())
    if isinstance(nested, list | tuple):
        return type(nested)(_unwrapped(value) for value in nested)
    return nested


def check_many(run: Runner, ranks: int, seeds: range) -> None:
    """Raises AssertionError, which begins with the seed, at the first reduction that is not as the oracle has it."""
    drawn = drawn_by_all(seeds, ranks)  # before the threads ask for it
    for (seed, reduction), *answers in zip(drawn, *run(seeds), strict=True):
        try:
            check_one(reduction, answers)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} on {ranks} ranks: {error}") from None


def check_one(drawn: Reduction, answers: Sequence[Any]) -> None:
    """``answers``: what `reduced` gave, of all ranks or some. Raises AssertionError."""
    policy, per_rank, adds = drawn
    check([[add] for add in adds], [answer for answer, _ in answers], policy)
    assert len(set(map(repr, (by_rank for _, by_rank in answers)))) == 1
    by_rank = answers[0][1]
    if not per_rank or isinstance(answers[0][0], str):
        assert by_rank is None
        return
    wanted = expected_by_rank([as_scalars(add) for add in adds], policy, spell=tuple)
    assert same(by_rank, wanted), (by_rank, wanted, adds)


def of_pool(pool: RankPool, name: str) -> Runner:
    return lambda seeds: pool.run(on_this_rank, seeds, name, timeout_sec=240).values()


def of_threads(ranks: int) -> Runner:
    return lambda seeds: run_threads(on_this_thread, ranks, seeds, timeout_sec=240).values()
