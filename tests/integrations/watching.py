"""Which collectives are issued on one group: `count_collectives` counts those of all groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def on_group(group: Any) -> Iterator[list[str]]:
    """Names of the collectives that are issued on ``group``."""
    calls: list[str] = []
    ops = ("allreduce", "allgather", "broadcast", "_allgather_base", "all_gather_single")
    originals = {op: getattr(dist.ProcessGroup, op) for op in ops if hasattr(dist.ProcessGroup, op)}
    methods = {op: vars(dist.ProcessGroup)[op] for op in originals}  # not the same objects: those bind no instance

    def watching(op: str, original: Any) -> Any:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is group:
                calls.append(op)
            return original(self, *args, **kwargs)

        return watched

    try:
        for op, original in originals.items():
            setattr(dist.ProcessGroup, op, watching(op, original))
        yield calls
    finally:
        for op, method in methods.items():
            setattr(dist.ProcessGroup, op, method)
