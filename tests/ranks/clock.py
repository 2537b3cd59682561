"""A clock in place of ``time`` in `ddpstats._ranks`, and a `Comm` that waits by it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._base.text import Rank
from ddpstats._ranks.calls import Channel
from ddpstats._ranks.comm import Watch, wait_in_slices
from ddpstats._ranks.failure import PROCESS_ID_BYTES, Membership, ProcessId
from ddpstats.testing.threads import in_process


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
    for name, module in list(sys.modules.items()):
        if name.startswith("ddpstats._ranks.") and hasattr(module, "time"):
            monkeypatch.setattr(module, "time", made)
    return made


class UnansweredComm:
    """A `Comm` whose other ranks shake hands and then never call again; to wait for them moves the clock.

    ``reduced_sec``: after so long the first reduction ends, and its sums say that ranks hold other keys.
    """

    def __init__(
        self, ranks: tuple[int, ...], clock: Clock, process: ProcessId, watch: Watch, reduced_sec: float | None
    ) -> None:
        self.ranks, self.rank, self.watch = ranks, ranks[0], watch
        self._clock, self._process, self._reduced_sec = clock, process, reduced_sec
        self._has_met = False

    def all_gather(self, payload: bytes, timeout_sec: float) -> list[bytes]:
        if self._has_met:
            wait_in_slices(self._sleep, timeout_sec, self.watch)
        self._has_met = True
        answer = payload[:-PROCESS_ID_BYTES] + self._process.pack()
        return [payload, *[answer] * (len(self.ranks) - 1)]

    def all_reduce(self, op: str, tensor: torch.Tensor, timeout_sec: float) -> None:
        if self._reduced_sec is None:
            wait_in_slices(self._sleep, timeout_sec, self.watch)
        else:
            self._clock.sleep(self._reduced_sec)
            tensor *= len(self.ranks)

    def _sleep(self, seconds: float) -> bool:
        self._clock.sleep(seconds)
        return False

    def close(self) -> None:
        pass


class LonelyGroup:
    """A process group for a reducer, seen by its first rank: the others have come if ``came``, and never call.

    ``ranks``: their global ranks. ``process``: which process each of the others is, this one by default.
    ``came_sec``: when they come. ``reduced_sec``: as of `UnansweredComm`.
    """

    def __init__(
        self,
        clock: Clock,
        ranks: tuple[int, ...] = (0, 1),
        came: bool = True,
        process: ProcessId | None = None,
        came_sec: float = 0.0,
        reduced_sec: float | None = None,
    ) -> None:
        ranks = tuple(Rank(rank, group_rank) for group_rank, rank in enumerate(ranks))
        store = in_process(HashStore())

        def join() -> None:
            for rank in ranks[1:]:
                Membership(store, rank, ranks).join()

        if came and came_sec:
            clock.at(came_sec, join)
        elif came:
            join()

        def connect(timeout_sec: float, watch: Watch) -> Any:
            return UnansweredComm(ranks, clock, process or ProcessId.mine(), watch, reduced_sec)

        self.channel = Channel(ranks, ranks[0], "the group", connect, store)
