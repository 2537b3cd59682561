"""Two saved tensors, element by element, in blocks: how close they are, and where in memory they differ.

Elements are taken in the memory order of A's original tensor where the dump has its strides, else in their logical
order. Both NaN, or the same infinity, at one place count as equal there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.files import open_regular
from ddpstats._base.text import first_line, printable
from ddpstats._rerun.archive import check_archive
from ddpstats.dump.compare._rules import KEPT_RUNS, Closeness, Runs
from ddpstats.dump.reader import DumpLeaf, RankDump
from ddpstats.dump.writer import checksum, is_dense
from ddpstats.errors import DumpError

_BLOCK_ELEMENTS = 1 << 20


def load_tensor(dump: RankDump, leaf: DumpLeaf) -> Tensor:
    """A leaf's saved tensor. Raises `DumpError` for a file that is missing, damaged, or holds anything but a tensor."""
    assert leaf.data_name is not None
    path = dump.tensor_file(leaf.data_name)
    try:
        with open_regular(path, follow=False) as file:
            check_archive(file)
        tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file makes torch raise
        reason = first_line(error)[:200]
        raise DumpError(
            f"{path} cannot be read as a tensor: {reason}. Copy it again, or dump the step again; only plain tensors "
            "are read, since anything else could run code.",
            path=str(path),
        ) from None
    if (kind := _odd_kind(tensor)) is not None:
        raise DumpError(f"{path} holds a {kind}, and should hold a plain tensor.", path=str(path))
    if "shape" in leaf.raw and tuple(tensor.shape) != leaf.shape:
        raise DumpError(
            f"{path} holds a tensor of shape {list(tensor.shape)}, and {dump.path} says {list(leaf.shape)}. It is "
            "a file of another dump: copy it again.",
            path=str(path),
        )
    plain: Tensor = tensor.detach()
    return plain


def _odd_kind(held: Any) -> str | None:
    """What a file holds, if that is no tensor with elements of its own."""
    if not isinstance(held, Tensor):
        return type(held).__name__
    for kind, is_it in (
        ("sparse tensor", held.layout is not torch.strided and not held.is_nested),
        ("nested tensor", held.is_nested),
        ("quantized tensor", held.is_quantized),
        ("tensor without elements", held.is_meta),
    ):
        if is_it:
            return kind
    if held.numel() * held.element_size() > held.untyped_storage().nbytes():
        return "tensor that repeats its elements"  # a few bytes, which may take all memory once they are looked at
    return None


def compare_saved(a: RankDump, leaf_a: DumpLeaf, b: RankDump, leaf_b: DumpLeaf) -> Closeness:
    """Compare two saved tensors; B's is the reference. Raises `DumpError`, also where their shapes differ."""
    tensor_a, tensor_b = load_tensor(a, leaf_a), load_tensor(b, leaf_b)
    both = f"{leaf_a.data_name} of {a.path} and {leaf_b.data_name} of {b.path} cannot be compared"
    if tensor_a.shape != tensor_b.shape:
        raise DumpError(f"{both}: their shapes are {list(tensor_a.shape)} and {list(tensor_b.shape)}.")
    try:
        return compare_tensors(tensor_a, tensor_b, leaf_a.stride)
    except (RuntimeError, MemoryError) as error:  # too large, or of a dtype that torch cannot compute with
        reason = first_line(error)[:200]
        raise DumpError(f"{both}: {reason}. Compare them by statistics: --mode statistics.") from None


def compare_tensors(a: Tensor, b: Tensor, stride: Sequence[int] | None = None) -> Closeness:
    """Compare two tensors of one shape; b is the reference.

    Args:
        a: any dtype.
        b: any dtype, the shape of a.
        stride: that of the original of a, where it is known: the order in which elements are counted.
    """
    sums = _Sums()
    collector = RunCollector()
    flat_a, flat_b = _flat(a, stride), _flat(b, stride)
    for start in range(0, a.numel(), _BLOCK_ELEMENTS):
        raw_x, raw_y = (flat[start : start + _BLOCK_ELEMENTS] for flat in (flat_a, flat_b))
        x, y = _wide(raw_x), _wide(raw_y)
        same = (x == y) | (x.isnan() & y.isnan())
        if _is_whole(raw_x) and _is_whole(raw_y):  # float64 has not all numbers of int64
            same &= raw_x.to(torch.int64) == raw_y.to(torch.int64)
        collector.add(~same, start)
        sums.add(x, y, same)
    runs = replace(
        collector.result(a.numel(), a.element_size()),
        is_dense=stride is None or len(stride) != a.dim() or is_dense(a.shape, stride),
    )
    if runs.differing == 1 and a.dtype == b.dtype:
        place = runs.first[0][0]
        runs = replace(runs, flipped_bits=_flipped_bits(flat_a[place], flat_b[place]))
    return sums.result(runs)


def _flat(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """Elements in memory order: the dimension of the largest stride outermost."""
    if stride is not None and len(stride) == tensor.dim():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -stride[dim]))
    return tensor.reshape(-1)


def _is_whole(block: Tensor) -> bool:
    return not block.is_floating_point() and not block.is_complex()


def _flipped_bits(*elements: Tensor) -> int:
    one, other = (element.reshape(1).resolve_conj().resolve_neg().view(torch.uint8) for element in elements)
    return sum(byte.bit_count() for byte in (one ^ other).tolist())


def _wide(block: Tensor) -> Tensor:
    return block.to(torch.complex128 if block.is_complex() else torch.float64)


class _Sums:
    """What is added up over the blocks."""

    def __init__(self) -> None:
        self.products = self.squares_a = self.squares_b = self.squared_distance = 0.0
        self.max_abs = self.max_relative = 0.0
        self.elements = self.within_one = self.within_five = 0

    def add(self, x: Tensor, y: Tensor, same: Tensor) -> None:
        self.elements += x.numel()
        nonfinite = same & ~x.isfinite()  # equal there, and would make every sum NaN
        x, y = x.masked_fill(nonfinite, 0), y.masked_fill(nonfinite, 0)
        square = float(x.abs().square().sum())
        self.squares_a += square
        if bool(same.all()):
            self.products += square
            self.squares_b += square
            self.within_one += x.numel()
            self.within_five += x.numel()
            return
        self.products += float((x * y.conj()).real.sum())
        self.squares_b += float(y.abs().square().sum())
        apart = (x - y).abs().masked_fill(same, 0)
        relative = (apart / y.abs()).masked_fill(same, 0)  # a reference of 0 gives infinity
        self.squared_distance += float(apart.square().sum())
        self.max_abs = _larger(self.max_abs, float(apart.max()))
        self.max_relative = _larger(self.max_relative, float(relative.max()))
        self.within_one += int((relative < 0.001).sum())
        self.within_five += int((relative < 0.005).sum())

    def result(self, runs: Runs) -> Closeness:
        count = max(1, self.elements)
        return Closeness(
            1.0 if not runs.count else self._cosine(),
            math.sqrt(self.squared_distance),
            self.max_abs,
            self.max_relative,
            self.within_one / count if self.elements else 1.0,
            self.within_five / count if self.elements else 1.0,
            runs,
        )

    def _cosine(self) -> float:
        size = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        if size == 0:
            return 0.0  # one is zero and the other is not
        return self.products / size if math.isfinite(size) else math.nan


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a  # NaN stays: it compares as larger with nothing


class RunCollector:
    """Collects the runs of elements that differ, block after block: one that goes on in the next block is one run."""

    def __init__(self) -> None:
        self._first: list[tuple[int, int]] = []
        self._last = (-1, -1)
        self._count = self._differing = self._largest = 0

    def add(self, differs: Tensor, start: int) -> None:
        """The next block, whose first element is ``start``."""
        if not bool(differs.any()):
            return
        edges = torch.diff(torch.nn.functional.pad(differs.to(torch.int8), (1, 1)))
        starts, stops = ((edges == edge).nonzero().flatten() + start for edge in (1, -1))
        self._differing += int((stops - starts).sum())
        self._count += starts.numel()
        if int(starts[0]) == self._last[1]:
            starts[0] = self._last[0]
            self._count -= 1
            if self._first[-1] == self._last:
                self._first.pop()
        self._last = int(starts[-1]), int(stops[-1])
        self._largest = max(self._largest, int((stops - starts).max()))
        left = KEPT_RUNS - len(self._first)
        self._first += zip(starts[:left].tolist(), stops[:left].tolist(), strict=True)

    def result(self, elements: int, item_bytes: int) -> Runs:
        return Runs(elements, self._differing, self._count, self._largest, tuple(self._first), item_bytes)


def tensor_digest(dump: RankDump, leaf: DumpLeaf) -> str:
    """Of the bytes of a saved tensor."""
    return checksum(load_tensor(dump, leaf))


# -- two tensors that should be equal: of two runs, or of two places in one run ----------------------------------------


@dataclass(frozen=True)
class TensorPair:
    """Two tensors, and how close they are."""

    name_a: str
    name_b: str
    leaf_a: DumpLeaf
    leaf_b: DumpLeaf
    close: Closeness


def find_leaf(dump: RankDump, name: str) -> DumpLeaf:
    """The tensor of ``NAME.path``. Raises `DumpError` if there is none, or it was not saved."""
    near: list[str] = []
    for member in dump.members():
        if name.startswith(f"{member.key}."):
            leaves = {f"{member.key}.{path}": leaf for path, leaf in dump.entry(member).leaves()}
            if name in leaves:
                if leaves[name].data_name is None:
                    raise DumpError(
                        f"{dump.path}: {name} was not saved. Dump with task tensor, or name it in "
                        "statistics.tensor_list.",
                        path=str(dump.path),
                    )
                return leaves[name]
            near += leaves
    known = f"It has {', '.join(near[:8])}" if near else "A name is that of an entry and of a tensor in it"
    raise DumpError(
        f"{dump.path} has no tensor {name}. {known}, like Functional.linear.0.forward.output.0.", path=str(dump.path)
    )


def compare_pair(a: RankDump, name_a: str, b: RankDump, name_b: str) -> TensorPair:
    """Compare a tensor of A with one of B. Raises `DumpError`, also where their shapes differ."""
    leaf_a, leaf_b = find_leaf(a, name_a), find_leaf(b, name_b)
    return TensorPair(name_a, name_b, leaf_a, leaf_b, compare_saved(a, leaf_a, b, leaf_b))


def as_text(pair: TensorPair) -> str:
    close = pair.close
    head = "EQUAL" if close.equal else "DIFFERENT"
    lines = [f"{head}: {close.runs.describe()}"]
    for side, name, leaf in (("A", pair.name_a, pair.leaf_a), ("B", pair.name_b, pair.leaf_b)):
        lines.append(f"  {side} {name}  {leaf.dtype} {list(leaf.shape)}{_place(leaf)}")
    if not close.equal:
        lines.append(
            f"  cosine {close.cosine:.9g}, largest absolute difference {close.max_abs:.6g}, "
            f"{close.one_thousandth:.2%} of the elements within one thousandth"
        )
    return printable(lines)


def _place(leaf: DumpLeaf) -> str:
    """Where the tensor lay, if the dump says."""
    if leaf.data_ptr is None:
        return ""
    stream = "" if leaf.stream is None else f", stream {leaf.stream}"
    return f" at 0x{leaf.data_ptr:x}, storage {leaf.storage_id} of {leaf.storage_bytes or 0:,} bytes{stream}"


def as_json(pair: TensorPair) -> dict[str, Any]:
    close = pair.close
    return {
        "verdict": "nothing different" if close.equal else "different",
        "a": {"name": pair.name_a, **pair.leaf_a.raw},
        "b": {"name": pair.name_b, **pair.leaf_b.raw},
        **close.as_json(),
    }
