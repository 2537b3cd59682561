"""Collectives under a torch whose operators do not have the reduce op: what `test_c10d_callers` runs on the ranks."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._observe import c10d_callers, collectives, operators
from ddpstats._observe.operators import Collective


class Seen:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None, bool]] = []

    def before(self, call: Collective) -> None:
        self.calls.append((call.op, call.reduce_op, call.blocking))

    def after(self, call: Collective, work: Any) -> None:
        pass

    def waiting(self, work: Any, limited: bool) -> bool:
        return False


def reduced_by() -> tuple[list[tuple[str, str | None, bool]], bool]:
    """Return what is observed of each collective, and whether `ProcessGroup` is as it was afterwards."""
    for module in (operators, collectives):
        vars(module)["operators_tell_reduce_op"] = False
    before, seen = dict(vars(dist.ProcessGroup)), Seen()
    ones, parts = torch.ones(2), [torch.ones(1), torch.ones(1)]
    collectives.subscribe(seen)
    try:
        dist.all_reduce(ones, dist.ReduceOp.MAX)
        dist.reduce(ones, 0, dist.ReduceOp.MIN)
        with contextlib.suppress(RuntimeError):  # which torch 2.6 gives with gloo
            dist.reduce_scatter(torch.ones(1), parts, async_op=True).wait()
        world: Any = dist.group.WORLD
        world.allreduce(ones).wait()  # C++ fills in what was not given
        assert c10d_callers.told() == c10d_callers.Told()
    finally:
        collectives.unsubscribe(seen)
    return seen.calls, before == dict(vars(dist.ProcessGroup))


def waits_in_slices(count: int) -> int:
    """Return how many collectives that end about when a slice does were waited for once more."""
    later, limit = 0, timedelta(milliseconds=1)
    for _ in range(count):
        if dist.get_rank() == 1:
            time.sleep(0.0009)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if not collectives.wait_within(work, limit):
            later += 1
            while not collectives.wait_within(work, limit):
                pass
    return later
