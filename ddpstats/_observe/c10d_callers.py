"""What c10d's operators do not tell of a collective on older torch, noted where Python asks a process group for it.

torch 2.9's operators hide which reduce op they are given, and most of torch 2.6's have no ``async_op``. There, while
collectives are observed,

1. each method of ``ProcessGroup`` that issues a collective is wrapped. It notes for its thread the reduce op in the
   options that it is given, and whether its caller waits: by the options, or, where they do not say, by the argument
   ``async_op`` of the function of ``torch.distributed`` that calls it;
2. the kernel of the operator, which runs below it in the same thread, reads the note (`Told`).

What is issued in C++ (DDP's reducer, functional collectives) has no note: it counts as asynchronous, and nobody knows
its reduce op. A torch whose operators tell both has no method wrapped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddpstats._observe.groups import group_methods
from ddpstats._observe.torch_compat import hide_from_dynamo


class Told(NamedTuple):
    """A collective that Python issues: its reduce op, None where that is not known; whether the caller waits for it."""

    reduce_op: Any = None
    is_blocking: bool = False


_thread = threading.local()
_UNTOLD = Told()
_OPTIONS = frozenset(
    getattr(dist.distributed_c10d, name)
    for name in (
        "AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions", "BroadcastOptions",
        "AllgatherOptions", "GatherOptions", "ScatterOptions", "AllToAllOptions", "BarrierOptions",
    )
    if hasattr(dist.distributed_c10d, name)
) if dist.is_available() else frozenset()  # fmt: skip


def told() -> Told:
    """Of the collective that this thread is just issuing."""
    found: Told = getattr(_thread, "told", _UNTOLD)
    return found


class CallerNotes:
    """The methods are wrapped when this is made, until `remove`."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {
            name: vars(dist.ProcessGroup)[name] for name in group_methods if name in vars(dist.ProcessGroup)
        }
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, _noting(original))

    def remove(self) -> None:
        """Restores the very methods that were there."""
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)


def _noting(original: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original.__get__(self)(*args, **kwargs)
        options = next((one for one in (*args, *kwargs.values()) if type(one) in _OPTIONS), None)
        before = told()
        _thread.told = Told(_reduce_op(options), _is_blocking(options, sys._getframe(1)))
        try:
            return original.__get__(self)(*args, **kwargs)
        finally:
            _thread.told = before

    hide_from_dynamo(method)
    return method


def _reduce_op(options: Any) -> Any:
    """Its number; None without options, where C++ fills in what it likes."""
    given = getattr(options, "reduceOp", None)
    return None if given is None else given.op


def _is_blocking(options: Any, caller: FrameType) -> bool:
    said = getattr(options, "asyncOp", None)
    if said is None and caller.f_globals is vars(dist.distributed_c10d):
        said = caller.f_locals.get("async_op")
    return said is False
