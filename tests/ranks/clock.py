"""A clock in place of ``time`` in the modules that decide when a rank is missing, and a `Comm` that waits by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._base.text import members
from ddpstats._ranks import channel, comm, mailbox, roster, store
from ddpstats._ranks.channel import Channel
from ddpstats._ranks.comm import Watch, wait_in_slices
from ddpstats._ranks.roster import PROCESS_ID_BYTES, ProcessId, Roster
from ddpstats._ranks.store import bounded


class Clock:
    """A clock that moves when a thread sleeps, and only then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [plan for plan in self._plans if plan[0] <= self.now]
        self._plans = [plan for plan in self._plans if plan not in due]
        for _, action in due:
            action()

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Call ``action`` once the clock has come to that moment."""
        self._plans.append((moment, action))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (mailbox, roster, store, comm, channel):
        monkeypatch.setattr(module, "time", made)
    return made


class UnansweredComm:
    """A `Comm` whose other ranks shake hands and then never call again; to wait for them moves the clock."""

    def __init__(self, ranks: tuple[int, ...], clock: Clock, process: ProcessId, watch: Watch) -> None:
        self.ranks, self.rank, self.watch = ranks, ranks[0], watch
        self._clock, self._process = clock, process

    def all_gather(self, payload: bytes, timeout_sec: float) -> list[bytes]:
        other = payload[:-PROCESS_ID_BYTES] + self._process.pack()
        return [payload, *[other] * (len(self.ranks) - 1)]

    def all_reduce_sum(self, tensor: torch.Tensor, timeout_sec: float) -> None:
        wait_in_slices(self._sleep, timeout_sec, self.watch)

    def _sleep(self, seconds: float) -> bool:
        self._clock.sleep(seconds)
        return False

    def close(self) -> None:
        pass


class LonelyGroup:
    """What a reducer takes for a process group, seen by its first rank: the others have come if ``came``, and no more.

    ``ranks``: their global ranks. ``process``: which process each of the others is, this one by default.
    """

    def __init__(
        self, clock: Clock, ranks: tuple[int, ...] = (0, 1), came: bool = True, process: ProcessId | None = None
    ) -> None:
        ranks, store = members(ranks), HashStore()
        for rank in ranks[1:] if came else ():
            Roster(bounded(store), rank, ranks).join()

        def connect(timeout_sec: float, watch: Watch) -> Any:
            return UnansweredComm(ranks, clock, process or ProcessId.mine(), watch)

        self.channel = Channel(ranks, ranks[0], "the group", connect, store)
