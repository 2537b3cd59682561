"""What runs on the ranks of `test_held_keys`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

import ddpstats
from ddpstats._reduction import held_keys
from ddpstats._reduction.held_keys import ROUNDS
from ddpstats._reduction.site import RETENTION_CALLS

Told = list[tuple[str | None, list[str]]]


class _Listener:
    def __init__(self) -> None:
        self.not_held: Told = []

    def renegotiated(self, name: str | None, new_keys: Sequence[str]) -> None:
        pass

    def stopped_holding(self, name: str | None, keys: Sequence[str]) -> None:
        self.not_held.append((name, list(keys)))


@contextmanager
def listening() -> Iterator[_Listener]:
    listener = _Listener()
    held_keys.listeners.append(listener)
    try:
        yield listener
    finally:
        held_keys.listeners.remove(listener)


def held_and_not() -> Told:
    """Rank 1 holds "snr" at first and at last; "l1" is rank 0's alone, all the time."""
    rank = dist.get_rank()
    with listening() as listener:
        for step in range(4 * ROUNDS):
            has_snr = rank == 0 or not ROUNDS <= step < 3 * ROUNDS
            stats = {"loss": 1.0, **({"snr": 1.0} if has_snr else {}), **({} if rank else {"l1": 1.0})}
            ddpstats.reduce_stats(stats, name="held")
    return listener.not_held


def in_turns() -> Told:
    with listening() as listener:
        for step in range(4 * ROUNDS):
            ddpstats.reduce_stats({f"part {step % 2}": 1.0}, name="turns")
    return listener.not_held


def generated() -> Told:
    """Names that were held a while ago are in no layout any more."""
    with listening() as listener:
        for step in range(2 * RETENTION_CALLS + ROUNDS):
            more = {f"step {step}": 1.0} if step < 2 * ROUNDS else {}
            reduced = ddpstats.reduce_stats({"loss": 1.0, **more}, name="generated")
        assert reduced.values == {"loss": 1.0}
    return listener.not_held
