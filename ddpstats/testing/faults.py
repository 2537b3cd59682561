"""Injects faults and counts collectives, from inside a function that runs on a rank."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import signal as signals
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddpstats._observe.operators import OPERATORS, index_of_tensors

_METHODS = {method: operator for operator in OPERATORS.values() for method in operator.method_names}


def die(signal: int = signals.SIGKILL) -> NoReturn:
    """End this process at once with `signal`, as a crash or the kernel's memory killer would. Never returns.

    Raises:
        RuntimeError: the signal was ignored or handled, and the process lives.
    """
    os.kill(os.getpid(), signal)
    raise RuntimeError(f"this process survived signal {signal}")


class CollectiveCount:
    """The counts that `count_collectives` yields; they grow while the block runs.

    `by_op` and `bytes_by_op` go by `ProcessGroup`'s own names (`allreduce`, `_allgather_base`, `barrier`, `send`, ...);
    bytes are those of the tensors this rank hands in (for `recv`, of the buffer it receives into).
    """

    def __init__(self) -> None:
        self.by_op: collections.Counter[str] = collections.Counter()
        self.bytes_by_op: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """The number of calls, of all ops together."""
        return self.by_op.total()

    def add(self, op: str, payload_bytes: int) -> None:
        """Count one call. Collectives may be issued by several threads at a time."""
        with self._lock:
            self.by_op[op] += 1
            self.bytes_by_op[op] += payload_bytes


@contextlib.contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count the collectives that this process issues from Python, on any group and any thread, inside the block.

    Local, not collective. It patches the methods of `torch.distributed.ProcessGroup` and puts back exactly what was
    there; blocks may be nested. It does not see what C++ issues by itself: DDP's gradient buckets, functional
    collectives and compiled graphs. A coalescing manager's collectives count when it flushes them, as one.

    Example:
        >>> with count_collectives() as seen:
        ...     dist.all_reduce(torch.ones(4))  # on rank 0 and rank 1
        >>> seen.total, seen.by_op["allreduce"], seen.bytes_by_op["allreduce"]
        (1, 1, 16)
    """
    count = CollectiveCount()
    originals = {op: vars(dist.ProcessGroup)[op] for op in _METHODS if op in vars(dist.ProcessGroup)}
    try:
        for op in originals:
            setattr(dist.ProcessGroup, op, _count_calls(op, getattr(dist.ProcessGroup, op), count))
        yield count
    finally:
        for op, original in originals.items():
            setattr(dist.ProcessGroup, op, original)


def _count_calls(op: str, call: Callable[..., Any], count: CollectiveCount) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        count.add(op, _bytes(_find_payload(op, args, kwargs)))
        return call(group, *args, **kwargs)

    return counted


def _find_payload(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensors among the arguments: those that are handed in, or, of a receive, that are written to."""
    operator = _METHODS[method]
    index = index_of_tensors(operator.schema, "in", "inout")
    if index is None:
        index = index_of_tensors(operator.schema, "out")
    if index is None:
        return None
    if len(args) > index:
        return args[index]
    named = (value for name, value in kwargs.items() if not name.startswith("output"))
    return next((value for value in named if isinstance(value, (torch.Tensor, list, tuple))), None)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, (list, tuple)):
        return sum(map(_bytes, tensors))
    return 0
