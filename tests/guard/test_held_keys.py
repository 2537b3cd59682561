"""The live view learns which keys a rank has stopped holding, and that it holds them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import ddpstats
from ddpstats.guard.recording import ROUNDS, Recording
from ddpstats.testing import RankPool


class _Listener(Recording):
    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.reports: list[str] = []

    def note(self, **changes: Any) -> None:
        super().note(**changes)
        if "not held any more" in changes:
            self.reports.append(changes["not held any more"])


@contextmanager
def listening() -> Iterator[_Listener]:
    listener = _Listener("nowhere")
    listener.subscribe()
    try:
        yield listener
    finally:
        listener.close()


def held_and_not() -> list[str]:
    """Rank 1 holds "snr" at first and at last; "l1" is rank 0's alone, all the time."""
    rank = dist.get_rank()
    with listening() as listener:
        for step in range(4 * ROUNDS):
            has_snr = rank == 0 or not ROUNDS <= step < 3 * ROUNDS
            stats = {"loss": 1.0, **({"snr": 1.0} if has_snr else {}), **({} if rank else {"l1": 1.0})}
            ddpstats.reduce_stats(stats, name="held")
    return listener.reports


def in_turns() -> list[str]:
    with listening() as listener:
        for step in range(4 * ROUNDS):
            ddpstats.reduce_stats({f"part {step % 2}": 1.0}, name="turns")
    return listener.reports


def two_sites() -> list[str]:
    """A reducer and a window of one name hold different keys all the time."""
    with listening() as listener, ddpstats.StatsWindow(name="train") as window:
        for _ in range(4 * ROUNDS):
            ddpstats.reduce_stats({"loss": 1.0, "acc": 1.0}, name="train")
            window.add({"loss": 1.0} if dist.get_rank() else {"loss": 1.0, "acc": 1.0})
            window.flush()
    return listener.reports


def test_two_call_sites_of_one_name_are_two(two_ranks: RankPool) -> None:
    assert two_ranks.run(two_sites).values() == [[], []]


def test_a_key_is_told_of_when_it_is_held_no_more_and_when_it_comes_back(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(held_and_not).values()
    assert first == []
    assert second == ["'snr' (name='held')", ""]


def test_keys_that_calls_take_turns_with_are_held(two_ranks: RankPool) -> None:
    assert two_ranks.run(in_turns).values() == [[], []]
