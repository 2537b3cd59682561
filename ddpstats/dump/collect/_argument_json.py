"""What is among arguments and results besides tensors, as plain data; and how to walk through all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddpstats._rerun.record import set_fields

DEEPEST = 8
MOST_ITEMS = 1_000  # that are no tensors, in one entry: a list of a million numbers is data, and no argument
SCALARS = (bool, int, float, str)
_MOST_CHARACTERS = 1_000  # of a string: a document is data as well
_MOST_BITS = 4_096  # of an integer; Python refuses to write some thousand digits
_AS_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, complex)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Every leaf of arguments or results, in order. A long list of what is no tensor is one leaf."""
    if depth < DEEPEST and not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)):
            if len(value) <= MOST_ITEMS or isinstance(value[0], Tensor):
                for item in value:
                    yield from tensors_in(item, depth + 1)
                return
        else:
            named = named_parts(value)
            if named is not None:
                for item in named.values():
                    yield from tensors_in(item, depth + 1)
                return
    yield value


def named_parts(value: Any) -> dict[Any, Any] | None:
    """Of a dict or a dataclass; None of anything else."""
    if isinstance(value, dict):
        return value
    if not hasattr(type(value), "__dataclass_fields__"):
        return None
    return {name: getattr(value, name) for name in set_fields(value)}


@functools.cache
def text(value: Any) -> str:
    """``str`` of a dtype or device; torch takes 10 microseconds for a device."""
    return str(value)


def scalar(value: Any) -> dict[str, Any]:
    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        return {"type": "int", "value": hex(value)[:_MOST_BITS]}
    written = value if kind in SCALARS else plain(value)
    if isinstance(written, str) and len(written) > _MOST_CHARACTERS:
        return {"type": kind.__name__, "value": written[:_MOST_CHARACTERS], "length": len(written)}
    return {"type": kind.__name__, "value": written}


def size_of(value: Any) -> int:
    """Of a tensor under tracing it may be a symbol: 0 then. To ask for its value would be recorded."""
    return value if type(value) is int else 0


def plain(value: Any) -> Any:
    """A number that is not quite a number: numpy's, an enum, a symbolic size."""
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def other(value: Any) -> dict[str, Any]:
    if isinstance(value, slice):
        return {"type": "slice", "value": [_slice_part(part) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"type": "ellipsis", "value": "..."}
    if isinstance(value, _AS_TEXT):
        kind = type(value)
        name = kind.__name__ if kind is complex else f"torch.{kind.__name__}"
        return {"type": name, "value": str(value)}
    return {"type": type(value).__name__}


def _slice_part(part: Any) -> Any:
    return part if part is None or type(part) is int else str(type(part).__name__)
