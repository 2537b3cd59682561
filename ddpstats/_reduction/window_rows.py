"""Adds of plain scalars in host memory, one row each, until there are enough of them to be summed up together.

What a row costs is what a window costs, so it is read at C speed, by the reader that fits the structure's leaves:

- Python numbers are packed as float64.
- Tensors are asked for their item one by one, and packed; below some dozens of them nothing is faster.
- More of them are stacked, where they have a dimension (to stack scalars, torch makes a view of each). torch would
  promote leaves of different dtypes to one of them: where that could round a value, the dtypes are compared.

Whatever a reader does not expect gives None, and the leaves are then read one by one. Rows are copies.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch

from ddpstats._reduction.tree import NUMBERS, Structure
from ddpstats._reduction.values import accelerator_in_use

Row = bytes | torch.Tensor
Reader = Callable[[Collection[Any]], Row | None]

_STACKED_FROM = 96  # tensors of one dimension; measured on torch 2.13
_MOST_NUMBERS = 16_384  # in the rows of one structure
_MOST_ROWS = 512
LARGEST = sys.float_info.max
"""Of the weights of a row."""

# Below it, integers are exact in the dtype that torch promotes them to.
_EXACT_BELOW = {torch.float16: 2.0**11, torch.bfloat16: 2.0**8, torch.float32: 2.0**24}
_EXACT = {torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}

_item = torch.Tensor.item
_dtype_of = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")


class Rows:
    """The rows of one structure. ``keys``: of a flat dict; by them an add of the same structure is known at once."""

    def __init__(
        self, structure: Structure, slots: Sequence[int], leaves: Sequence[Any], keys: list[Any] | None
    ) -> None:
        self.structure, self.slots, self.keys = structure, slots, keys
        self.read: Reader = _reader(structure, leaves)
        self.pending: list[Any] = []  # of one kind, for they have one reader
        self.weights = array("d")
        self.limit = max(1, min(_MOST_ROWS, _MOST_NUMBERS // max(structure.leaf_count, 1)))

    def take(self) -> tuple[torch.Tensor, array[float]]:
        """All rows [adds, leaves] as float64 with their weights; afterwards there are none."""
        rows, weights, shape = self.pending, self.weights, (-1, self.structure.leaf_count)
        self.pending, self.weights = [], array("d")
        if isinstance(rows[0], torch.Tensor):
            return torch.stack(rows).view(shape).double(), weights
        return torch.frombuffer(bytearray().join(rows), dtype=torch.float64).view(shape), weights


def _reader(structure: Structure, leaves: Sequence[Any]) -> Reader:
    reading, count = structure.reading, structure.leaf_count
    if reading == "general" or not count:
        return _nothing
    if reading == "numbers":
        return _numbers_reader(count)
    if not all(map(_is_cpu, (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))):
        return _nothing
    if reading == "plain":
        return _mixed_reader(count)
    first: torch.Tensor = leaves[0]
    stackable = first.numel() == 1 and (first.dtype in _EXACT or first.dtype in _EXACT_BELOW)
    if stackable and (accelerator_in_use() or (first.dim() and count >= _STACKED_FROM)):
        return _stack_reader(first, count)
    return _item_reader(count)


def _nothing(values: Collection[Any]) -> Row | None:
    return None


def _numbers_reader(count: int) -> Reader:
    pack = struct.Struct(f"{count}d").pack

    def read(values: Collection[Any]) -> Row | None:
        try:
            return pack(*values) if {*map(type, values)} <= NUMBERS else None
        except struct.error:  # an integer that is too large
            return None

    return read


def _item_reader(count: int) -> Reader:
    pack = struct.Struct(f"{count}d").pack
    has_device: Callable[[], bool] = torch.cuda.is_initialized

    def read(values: Collection[Any]) -> Row | None:
        if has_device():  # a tensor that lives there must not be asked
            return None
        try:
            return pack(*map(_item, values))
        except Exception:  # anything else than tensors of one real number
            return None

    return read


def _mixed_reader(count: int) -> Reader:
    pack = struct.Struct(f"{count}d").pack

    def read(values: Collection[Any]) -> Row | None:
        if not {*map(type, values)} <= NUMBERS | {torch.Tensor}:
            return None
        try:
            if not all(value.is_cpu for value in values if type(value) is torch.Tensor):
                return None
            return pack(*[_item(value) if type(value) is torch.Tensor else value for value in values])
        except Exception:
            return None

    return read


def _stack_reader(first: torch.Tensor, count: int) -> Reader:
    dtype = first.dtype
    limit = _EXACT_BELOW.get(dtype, math.inf)

    def read(values: Collection[Any]) -> Row | None:
        try:
            with torch.inference_mode():
                row = torch.stack(list(values))
                if type(row) is not torch.Tensor or row.dtype != dtype or not row.is_cpu or row.numel() != count:
                    return None
                if limit == math.inf or torch.linalg.vector_norm(row).item() < limit:
                    return row
                return row if {*map(_dtype_of, values)} == {dtype} else None
        except Exception:
            return None

    return read
