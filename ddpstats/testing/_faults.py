"""Faults to inject and collectives to count, from inside a function that runs on a rank."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import signal as signals
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# How to find what a rank hands in: the position of the tensors among the arguments after self, and their keyword names.
_TENSORS = (0, ("tensors", "tensor"))
_INPUTS = (1, ("input_tensors", "input_list", "inputs", "input", "inputTensor", "input_tensor"))
_NOTHING = (0, ())

_OPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "allreduce": _TENSORS,
    "allreduce_coalesced": _TENSORS,
    "broadcast": _TENSORS,
    "reduce": _TENSORS,
    "send": _TENSORS,
    "recv": _TENSORS,
    "recv_anysource": _TENSORS,
    "allgather": _INPUTS,
    "allgather_coalesced": _INPUTS,
    "allgather_into_tensor_coalesced": _INPUTS,
    "_allgather_base": _INPUTS,
    "all_gather_single": _INPUTS,
    "all_gather_single_coalesced": _INPUTS,
    "gather": _INPUTS,
    "scatter": _INPUTS,
    "reduce_scatter": _INPUTS,
    "reduce_scatter_tensor_coalesced": _INPUTS,
    "_reduce_scatter_base": _INPUTS,
    "reduce_scatter_single": _INPUTS,
    "reduce_scatter_single_coalesced": _INPUTS,
    "alltoall": _INPUTS,
    "alltoall_base": _INPUTS,
    "all_to_all_single": _INPUTS,
    "barrier": _NOTHING,
    "monitored_barrier": _NOTHING,
}


def die(signal: int = signals.SIGKILL) -> NoReturn:
    """End this process at once with `signal`, as a crash or the kernel's memory killer would. Never returns.

    Raises:
        RuntimeError: the signal was ignored or handled, and the process lives.
    """
    os.kill(os.getpid(), signal)
    raise RuntimeError(f"this process survived signal {signal}")


def sleep_past(seconds: float, *, margin_sec: float = 0.5) -> None:
    """Block until a limit of `seconds` that starts now has surely passed on the other ranks: `margin_sec` longer."""
    until = time.monotonic() + seconds + margin_sec
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)


class CollectiveCount:
    """What `count_collectives` yields; grows while the block runs.

    `by_op` and `bytes_by_op` go by `ProcessGroup`'s own names (`allreduce`, `_allgather_base`, `barrier`, `send`, ...);
    bytes are those of the tensors this rank hands in (for `recv`, of the buffer it receives into).
    """

    def __init__(self) -> None:
        self.by_op: collections.Counter[str] = collections.Counter()
        self.bytes_by_op: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """How many calls there were, of all ops together."""
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
        ...     dist.all_reduce(torch.ones(4))  # rank 0 and rank 1 alike
        >>> seen.total, seen.by_op["allreduce"], seen.bytes_by_op["allreduce"]
        (1, 1, 16)
    """
    count = CollectiveCount()
    originals = {op: vars(dist.ProcessGroup)[op] for op in _OPS if op in vars(dist.ProcessGroup)}
    try:
        for op in originals:
            setattr(dist.ProcessGroup, op, _counting(op, getattr(dist.ProcessGroup, op), count))
        yield count
    finally:
        for op, original in originals.items():
            setattr(dist.ProcessGroup, op, original)


def _counting(op: str, call: Callable[..., Any], count: CollectiveCount) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        count.add(op, _bytes(_handed_in(op, args, kwargs)))
        return call(group, *args, **kwargs)

    return counted


def _handed_in(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position, names = _OPS[op]
    if names and position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, (list, tuple)):
        return sum(map(_bytes, tensors))
    return 0
