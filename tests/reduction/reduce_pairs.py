"""Random reductions against the oracle, on real ranks and on threads.

``python -m tests.reduction.reduce_pairs SEED COUNT`` takes COUNT reductions from SEED on, on 1 to 8 ranks in turn: real
ones, and threads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ddpstats
from ddpstats.errors import NonFiniteStat
from ddpstats.testing import PerRank, RankPool, ThreadGroup, run_threads
from tests.reduction.oracle import expected_by_rank, same
from tests.reduction.window_pairs import Add, Draw, as_scalars, check, told

Part = tuple[str, bool, Any, Any]
"""What a rank is given: a policy, whether single ranks' values are asked for, stats and weight."""
Runner = Callable[[Sequence[Sequence[Part]]], Sequence[Sequence[Any]]]
_AT_ONCE = 250


def reduced(part: Part, **where: Any) -> tuple[Any, Any]:
    """What it tells, or the error's text; and what it tells of single ranks."""
    policy, per_rank, stats, weight = part
    try:
        found = ddpstats.StatsReducer(nonfinite=policy, per_rank=per_rank, **where)(stats, weight)  # type: ignore[arg-type]
    except NonFiniteStat as error:
        return str(error), None
    return told(found), _unwrapped(found.by_rank)


def on_this_rank(parts: Sequence[Part], name: str) -> list[tuple[Any, Any]]:
    """With reducers that are kept: under one name they meet layouts of all kinds."""
    found: list[tuple[Any, Any]] = []
    for policy, per_rank, stats, weight in parts:
        try:
            one = ddpstats.reduce_stats(stats, weight, name=name, nonfinite=policy, per_rank=per_rank)  # type: ignore[arg-type]
        except NonFiniteStat as error:
            found.append((str(error), None))
        else:
            found.append((told(one), _unwrapped(one.by_rank)))
    return found


def on_this_thread(group: ThreadGroup, parts: Sequence[Sequence[Part]]) -> list[tuple[Any, Any]]:
    return [reduced(part, group=group, timeout_sec=60) for part in parts[group.rank]]


def _unwrapped(nested: Any) -> Any:
    if isinstance(nested, ddpstats.RankValues):
        return tuple(nested.values)
    if isinstance(nested, dict):
        return type(nested)((key, _unwrapped(value)) for key, value in nested.items())
    if isinstance(nested, list | tuple):
        return type(nested)(_unwrapped(value) for value in nested)
    return nested


def check_many(run: Runner, ranks: int, seeds: Sequence[int]) -> None:
    """Raises AssertionError, which begins with the seed, at the first reduction that is not as the oracle has it."""
    drawn = [Draw(seed, tensors=0.5, wild=0.3).reduction(ranks) for seed in seeds]
    answers = run([[(policy, per_rank, *adds[rank]) for policy, per_rank, adds in drawn] for rank in range(ranks)])
    for seed, (policy, per_rank, adds), *told_by_ranks in zip(seeds, drawn, *answers, strict=True):
        try:
            check_one(policy, per_rank, adds, told_by_ranks)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} on {ranks} ranks: {error}") from None


def check_one(policy: str, per_rank: bool, adds: Sequence[Add], answers: Sequence[Any]) -> None:
    """``answers``: of `on_this_rank`, of all ranks or some. Raises AssertionError."""
    check([[add] for add in adds], [answer for answer, _ in answers], policy)
    assert len(set(map(repr, (by_rank for _, by_rank in answers)))) == 1
    by_rank = answers[0][1]
    if not per_rank or isinstance(answers[0][0], str):
        assert by_rank is None
        return
    wanted = expected_by_rank([as_scalars(add) for add in adds], policy, spell=tuple)
    assert same(by_rank, wanted), (by_rank, wanted, adds)


def of_pool(pool: RankPool, name: str) -> Runner:
    return lambda parts: pool.run(on_this_rank, PerRank(parts), name, timeout_sec=240).values()


def of_threads(parts: Sequence[Sequence[Part]]) -> Sequence[Sequence[Any]]:
    return run_threads(on_this_thread, len(parts), parts).values()


def main(first_seed: int, count: int) -> None:
    """Of real ranks one pool at a time lives."""
    seed, started = first_seed, time.monotonic()
    share = max(_AT_ONCE, min(20_000, count // 16))
    while seed < first_seed + count:
        for ranks in range(1, 9):
            with RankPool(ranks, timeout_sec=600) as pool:
                for run in (of_pool(pool, "all"), of_threads):
                    for _ in range(0, share, _AT_ONCE):
                        if seed >= first_seed + count:
                            break
                        seeds = range(seed, min(seed + _AT_ONCE, first_seed + count))
                        check_many(run, ranks, seeds)
                        seed = seeds.stop
            done = seed - first_seed
            print(
                f"seeds {first_seed} to {seed - 1}: {done:,} reductions, {time.monotonic() - started:.0f} s", flush=True
            )


if __name__ == "__main__":
    from tests.reduction import reduce_pairs  # ranks import what they run

    reduce_pairs.main(int(sys.argv[1]), int(sys.argv[2]))
