"""Compares two saved tensors element by element, in blocks: how close they are, and where in memory they differ.

Elements are taken in the memory order of the first tensor's original where the dump has its strides, otherwise in
their logical order. Two NaN, or the same infinity, are equal.

A wrong computation differs in scattered places or everywhere. Memory that another kernel overwrote differs in one
contiguous block, often of a size that is a power of two; `DifferingRuns.words` says which of these it looks like.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from ddpstats._base.files import open_regular
from ddpstats._base.text import count_of, first_line
from ddpstats.dump.analyze import DumpLeaf, RankDump
from ddpstats.dump.msprobe import is_accurate
from ddpstats.dump.writer import is_dense
from ddpstats.errors import DumpError

KEPT_RUNS = 100
_BLOCK_ELEMENTS = 1 << 20
_SHOWN_RUNS = 4
_FEW_RUNS = 8
_MAX_PICKLE_BYTES = 64 << 20


@dataclass(frozen=True)
class DifferingRuns:
    """The runs of elements that differ, in flat memory order.

    Attributes:
        elements: of the whole tensor.
        differing: the number of elements that differ.
        count: the number of runs.
        largest: the number of elements of the largest run.
        first: the first runs, as (start, stop) with stop excluded; at most `KEPT_RUNS`.
        words: what they look like.
    """

    elements: int
    differing: int
    count: int
    largest: int
    first: tuple[tuple[int, int], ...]
    words: str


@dataclass(frozen=True)
class Closeness:
    """The distance of a tensor from the reference.

    Attributes:
        cosine: of the angle between them; 1 where all is equal, 0 where only one of them is zero, NaN where one has
            what is not finite and the other differs there.
        euclidean: the distance.
        max_abs: the largest absolute difference.
        max_relative: the largest relative difference; infinite where the reference is 0 and the other is not, NaN where
            what is not finite differs.
        one_thousandth: the share of elements with a relative difference below 0.001.
        five_thousandths: the share below 0.005.
        runs: where they differ.
    """

    cosine: float
    euclidean: float
    max_abs: float
    max_relative: float
    one_thousandth: float
    five_thousandths: float
    runs: DifferingRuns

    @property
    def equal(self) -> bool:
        return not self.runs.count

    @property
    def accurate(self) -> bool:
        """Return msprobe's verdict."""
        return is_accurate(self.cosine, self.max_abs)


# -- files -------------------------------------------------------------------------------------------------------------


def load_tensor(dump: RankDump, leaf: DumpLeaf) -> Tensor:
    """Load a leaf's tensor. Raises `DumpError` for a file that is missing, damaged, or holds anything but a tensor."""
    assert leaf.data_name is not None
    path = dump.tensor_file(leaf.data_name)
    try:
        with open_regular(path, follow=False) as file:
            _check_archive(file)
        tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file makes torch raise
        raise DumpError(
            f"{path} cannot be read as a tensor: {first_line(error)[:200]}. Copy it again, or dump the step again; "
            "only plain tensors are read, since anything else could run code.",
            path=str(path),
        ) from None
    if (kind := _odd_kind(tensor)) is not None:
        raise DumpError(f"{path} holds a {kind}, and should hold a plain tensor.", path=str(path))
    shape = leaf.raw.get("local_shape") or leaf.raw.get("shape")  # of a DTensor, this rank's part is in the file
    if shape is not None and list(tensor.shape) != shape:
        raise DumpError(
            f"{path} holds a tensor of shape {list(tensor.shape)}, and {dump.path} says {shape}. It is a file of "
            "another dump: copy it again.",
            path=str(path),
        )
    plain: Tensor = tensor.detach()
    return plain


def _check_archive(file: BinaryIO) -> None:
    """Raise ValueError for an archive that unpacks to more than it holds, or has a large pickle beside its tensors."""
    entries = zipfile.ZipFile(file).infolist()
    if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise ValueError("it unpacks to more than it holds")
    size = sum(entry.file_size for entry in entries if entry.filename.endswith("data.pkl"))
    if size > _MAX_PICKLE_BYTES:
        raise ValueError(f"its data.pkl has {size:,} bytes, and at most {_MAX_PICKLE_BYTES:,} are read")


def _odd_kind(held: object) -> str | None:
    """Return what a file holds, if that is no tensor that holds its elements."""
    if not isinstance(held, Tensor):
        return type(held).__name__
    kinds = {
        "nested tensor": held.is_nested,
        "sparse tensor": held.layout is not torch.strided,
        "quantized tensor": held.is_quantized,
        "tensor without elements": held.is_meta,
    }
    if any(kinds.values()):
        return next(kind for kind, is_it in kinds.items() if is_it)
    if held.numel() * held.element_size() > held.untyped_storage().nbytes():
        return "tensor that repeats its elements"  # a few bytes, which may take all memory once they are looked at
    return None


def compare_saved(a: RankDump, leaf_a: DumpLeaf, b: RankDump, leaf_b: DumpLeaf) -> Closeness:
    """Compare two saved tensors of one shape; B's is the reference. Raises `DumpError`."""
    tensor_a, tensor_b = load_tensor(a, leaf_a), load_tensor(b, leaf_b)
    try:
        return compare_tensors(tensor_a, tensor_b, leaf_a.stride)
    except (RuntimeError, MemoryError) as error:  # too large, of two shapes, or of a dtype that torch cannot compute
        raise DumpError(
            f"{leaf_a.data_name} of {a.path} and {leaf_b.data_name} of {b.path} cannot be compared: "
            f"{first_line(error)[:200]}. Compare them by statistics: --mode statistics."
        ) from None


# -- elements ----------------------------------------------------------------------------------------------------------


def compare_tensors(a: Tensor, b: Tensor, stride: Sequence[int] | None = None) -> Closeness:
    """Compare two tensors of one shape and any dtype; b is the reference.

    Args:
        stride: of the original of a, where it is known: the order in which elements are counted.
    """
    if stride is not None and len(stride) != a.dim():
        stride = None
    flat_a, flat_b = _flat(a, stride), _flat(b, stride)
    collector = _RunCollector()
    products = squares_a = squares_b = squared_distance = max_abs = max_relative = 0.0
    within_one = within_five = 0
    for start in range(0, a.numel(), _BLOCK_ELEMENTS):
        raw_x, raw_y = (flat[start : start + _BLOCK_ELEMENTS] for flat in (flat_a, flat_b))
        x, y = _wide(raw_x), _wide(raw_y)
        same = (x == y) | (x.isnan() & y.isnan())
        if _is_whole(raw_x) and _is_whole(raw_y):  # float64 has not all numbers of int64
            same &= raw_x.to(torch.int64) == raw_y.to(torch.int64)
        collector.add(~same, start)
        nonfinite = same & ~x.isfinite()  # equal there, and would make every sum NaN
        x, y = x.masked_fill(nonfinite, 0), y.masked_fill(nonfinite, 0)
        distance = (x - y).abs().masked_fill(same, 0)
        relative = (distance / y.abs()).masked_fill(same, 0)  # a reference of 0 gives infinity
        products += float((x * y.conj()).real.sum())
        squares_a += float(x.abs().square().sum())
        squares_b += float(y.abs().square().sum())
        squared_distance += float(distance.square().sum())
        max_abs = _larger(max_abs, float(distance.max()))
        max_relative = _larger(max_relative, float(relative.max()))
        within_one += int((relative < 0.001).sum())
        within_five += int((relative < 0.005).sum())
    size = math.sqrt(squares_a) * math.sqrt(squares_b)
    cosine = 0.0 if size == 0 else products / size if math.isfinite(size) else math.nan
    elements = max(1, a.numel())
    return Closeness(
        cosine if collector.count else 1.0,
        math.sqrt(squared_distance),
        max_abs,
        max_relative,
        within_one / elements if a.numel() else 1.0,
        within_five / elements if a.numel() else 1.0,
        collector.result(flat_a, flat_b, stride is None or is_dense(a.shape, stride)),
    )


def _flat(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """Return the elements in memory order: the dimension of the largest stride outermost."""
    if stride is not None:
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -stride[dim]))
    return tensor.reshape(-1)


def _wide(block: Tensor) -> Tensor:
    return block.to(torch.complex128 if block.is_complex() else torch.float64)


def _is_whole(block: Tensor) -> bool:
    return not block.is_floating_point() and not block.is_complex()


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a  # NaN stays: it compares as larger with nothing


class _RunCollector:
    """Collects the runs of elements that differ, block after block: one that goes on in the next block is one run."""

    def __init__(self) -> None:
        self.count = self._differing = self._largest = 0
        self._first: list[tuple[int, int]] = []
        self._last = (-1, -1)

    def add(self, differs: Tensor, start: int) -> None:
        """Take the next block, whose first element is ``start``."""
        if not bool(differs.any()):
            return
        edges = torch.diff(torch.nn.functional.pad(differs.to(torch.int8), (1, 1)))
        starts, stops = ((edges == edge).nonzero().flatten() + start for edge in (1, -1))
        self._differing += int((stops - starts).sum())
        self.count += starts.numel()
        if int(starts[0]) == self._last[1]:
            starts[0] = self._last[0]
            self.count -= 1
            if self._first[-1] == self._last:
                self._first.pop()
        self._last = int(starts[-1]), int(stops[-1])
        self._largest = max(self._largest, int((stops - starts).max()))
        left = KEPT_RUNS - len(self._first)
        self._first += zip(starts[:left].tolist(), stops[:left].tolist(), strict=True)

    def result(self, a: Tensor, b: Tensor, dense: bool) -> DifferingRuns:
        """Return the runs of two flat tensors; ``dense``: neighbours in them are neighbours in memory."""
        words = self._words(a, b, dense)
        return DifferingRuns(a.numel(), self._differing, self.count, self._largest, tuple(self._first), words)

    def _words(self, a: Tensor, b: Tensor, dense: bool) -> str:
        elements, item_bytes = a.numel(), a.element_size()
        if not self.count:
            return f"all {elements:,} elements are equal"
        if self._differing == elements:
            return f"all {elements:,} elements differ: no block of memory stands out"
        (start, stop), size = self._first[0], _size(self._largest, item_bytes)
        if self._differing == 1:
            flipped = a.dtype == b.dtype and _differing_bits(a[start], b[start]) == 1
            return f"element {start} of {elements} differs: a single one" + (", by a single bit" if flipped else "")
        if self.count == 1:
            kind = f"contiguous, {size}" if dense else "in a row, in a view with gaps"
            speaks = ", which is what a buffer overwritten in memory looks like" if dense and stop - start >= 16 else ""
            return f"elements {start}..{stop - 1} of {elements} differ: {kind}{speaks}"
        shown = ", ".join(f"{start}..{stop - 1}" for start, stop in self._first[:_SHOWN_RUNS])
        more = ", ..." if self.count > _SHOWN_RUNS else ""
        is_block = dense and self.count <= _FEW_RUNS and self._largest * self.count >= 64
        kind = "a few contiguous blocks, as of overwritten memory" if is_block else "scattered, as computed values are"
        return (
            f"{self._differing:,} of {elements:,} elements differ, in {self.count:,} runs, the largest of {size}: "
            f"{shown}{more}; {kind}"
        )


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


def _size(elements: int, item_bytes: int) -> str:
    size = elements * item_bytes
    unit, scale = next(item for item in _UNITS if size >= item[1])
    power = " (a power of two)" if size & (size - 1) == 0 else ""
    return f"{count_of(elements, 'elements')} = {size / scale:,.4g} {unit}{power}"


def _differing_bits(*elements: Tensor) -> int:
    a, b = (element.reshape(1).resolve_conj().resolve_neg().view(torch.uint8) for element in elements)
    return sum(byte.bit_count() for byte in (a ^ b).tolist())
