"""Arguments and results as plain data: what a tensor is, its statistics, and where it is in memory.

Lists, tuples, dicts and dataclasses become lists and dicts, with a leaf for each value in them.

1. A tensor in host memory is measured at once: passes for the sum, the product with itself and the range, in float32
   or its own wider type. They do not depend on the order of the elements, so a transposed tensor is read as it
   is in memory; of an expanded one, what is there. What is not finite, or out of the range of such a pass, is measured
   as on a device.
2. On a device all of it is always computed, in float64, into one small tensor, and nothing waits.
   `TensorSummaries.read_devices` reads these, in one copy for each device.
3. On an accelerator they are computed on a stream of their own, from a copy made on the program's: the copy is in order
   with what the program writes there before and after, so that what is measured is what the program itself would have
   read. Where too many copies are under way, they are computed on the program's stream, without one. The stream follows
   every stream of the program that had something to be read, and is all that `TensorSummaries.read_devices` waits for.
   While a CUDA graph is captured nothing is measured: it would become part of the graph.
4. A tensor in host memory that comes twice at one moment of one entry is measured once. Nothing is remembered beyond
   that: memory that was overwritten in the meantime must not look as it was.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ddpstats._observe.gradient_norms import held_values
from ddpstats._observe.torch_compat import is_functorch_tensor, storage_id
from ddpstats._ranks.device import (
    computes_on,
    is_capturing,
    new_stream,
    stream_number,
    widest_float,
)
from ddpstats._rerun.record import set_fields
from ddpstats.dump.statistics import STATISTICS, statistic_keys
from ddpstats.dump.writer import TensorFiles, as_json, checksum, is_dense, without_repeats

Leaf = dict[str, Any]

# -- tensors ----------------------------------------------------------------------------------------------------------

_LEAF_BYTES = 1_700  # of a dict, roughly, and of CUDA's smallest block of memory
_ENTRY_BYTES = 1_000  # of an entry besides its leaves
_COPIED_BYTES = 256 << 20  # at most, on devices
_storage_numbers = itertools.count(1)


class _Deferred(NamedTuple):
    """A leaf whose statistics are on a device, and the tensor that was measured."""

    leaf: Leaf
    numbers: Tensor
    dtype: torch.dtype
    shape: torch.Size
    repeats: int


@dataclass(kw_only=True, eq=False)
class TensorSummaries:
    """Describes the tensors of one step: a leaf for each, with its statistics and where it is in memory.

    Args:
        md5: whether leaves have a checksum.
        files: where tensors are saved.
        saves: whether the tensors of an entry of this name are saved.
        max_bytes: what may be held at once; None for no limit. After the first leaf that does not fit none has numbers.
        note_error: called with where a leaf failed, and why.

    Attributes:
        first_dropped: the name of the first entry of which something was not kept.
    """

    md5: bool
    files: TensorFiles
    saves: Callable[[str], bool]
    max_bytes: int | None
    note_error: Callable[[str, Exception], None]
    first_dropped: str | None = None
    _held_bytes: int = 0
    _storages: dict[int, tuple[int, StorageWeakRef]] = field(default_factory=dict)
    _deferred: list[_Deferred] = field(default_factory=list)
    _streams: dict[torch.device, torch.Stream | None] = field(default_factory=dict)
    _copies: deque[tuple[torch.Event, Tensor]] = field(default_factory=deque)
    _no_numbers: Leaf = field(default_factory=lambda: dict.fromkeys(statistic_keys("relative")))
    _no_counts: Leaf = field(default_factory=lambda: dict.fromkeys(statistic_keys("equal")))
    _moments: Iterator[int] = field(default_factory=itertools.count)
    _copied_bytes: int = 0

    @property
    def deferred_count(self) -> int:
        """The number of leaves whose statistics are on a device."""
        return len(self._deferred)

    def of_entry(self, name: str) -> EntryLeaves:
        """Return what makes the leaves of the entry ``name``, from its tensors as they are now."""
        return EntryLeaves(self, name, self.saves(name), next(self._moments))

    def describe(self, tensor: Tensor, name: str, path: str, is_saved: bool, moment: int) -> Leaf:
        leaf: Leaf = {"type": "torch.Tensor"}
        values = None
        try:
            values = plain_values(tensor)
            leaf.update(self._description(tensor, values))
            saved = values if is_saved and "sparse" not in text(tensor.layout) else None  # not of the shape it stores
            size = _LEAF_BYTES + (0 if saved is None else without_repeats(saved)[0].nbytes)
            if values is not None and self._fits(size, name) and (values.is_cpu or not is_capturing()):
                if values.numel():
                    self._measure(leaf, values)
                if saved is not None and not values.is_meta:
                    leaf["data_name"] = self.files.save(saved, name, path)
                    self._order(saved.device)
                if self.md5 and not values.is_meta:
                    leaf["md5"] = checksum(values)
        except Exception as error:
            self.note_error(f"{name}.{path}", error)
        if is_saved or self.md5:
            for key in self._no_counts:  # behind those of msprobe
                leaf[key] = leaf.pop(key, None)
        leaf.update(self._memory_of(tensor if values is None else values))
        leaf["moment"] = moment
        return leaf

    def entry_fits(self, name: str) -> bool:
        """Return whether an entry can be held besides its leaves; called as it is complete."""
        return self._fits(_ENTRY_BYTES, name)

    def release(self) -> None:
        """Hold nothing: it is written."""
        self._held_bytes = 0

    def _fits(self, size: int, name: str) -> bool:
        if self.max_bytes is None:
            return True
        self._held_bytes += size
        if self._held_bytes > self.max_bytes:
            self.first_dropped = self.first_dropped or name
        return self._held_bytes <= self.max_bytes

    def _description(self, tensor: Tensor, values: Tensor | None) -> Leaf:
        """Return dtype, shape and the like. A ragged tensor's shape is that of the numbers it holds."""
        shown = values if tensor.is_nested and values is not None else tensor
        leaf: Leaf = {
            "dtype": text(tensor.dtype),
            "shape": list(shown.shape),
            **self._no_numbers,
            "requires_grad": tensor.requires_grad,
            **self._no_counts,
        }
        if shown is not tensor:
            leaf["layout"] = "nested"
        elif hasattr(tensor, "placements"):  # a DTensor: the numbers are those of this rank's part
            leaf["device_mesh"] = tensor.device_mesh.mesh.tolist() if hasattr(tensor, "device_mesh") else None
            leaf["placements"] = [str(placement) for placement in tensor.placements]
            leaf["local_shape"] = None if values is None else list(values.shape)
        elif tensor.layout is not torch.strided:  # the numbers are those of the stored elements
            leaf["layout"] = text(tensor.layout).removeprefix("torch.")
            leaf["nnz"] = None if values is None else len(values)
        return leaf

    def _measure(self, leaf: Leaf, values: Tensor) -> None:
        held, repeats = (values, 1) if values.is_contiguous() else without_repeats(values)
        if _is_on_host(values):
            _fill(leaf, as_statistics(host_numbers(held, values.shape), held.dtype, held.shape, repeats))
        else:
            numbers = self._on_device(held, values.shape)
            self._deferred.append(_Deferred(leaf, numbers, held.dtype, held.shape, repeats))

    def _on_device(self, values: Tensor, shape: torch.Size) -> Tensor:
        device, size = values.device, values.nbytes
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        stream = self._streams[device]
        if stream is None or not self._may_copy(size):
            numbers = device_numbers(values, shape)
            self._order(device)
            return numbers
        copy = values.detach().clone()
        with computes_on(stream):
            numbers = device_numbers(copy, shape)
        self._copies.append((stream.record_event(), copy))
        self._copied_bytes += size
        return numbers

    def _order(self, device: torch.device) -> None:
        """Let `read_devices` wait for what the program's stream has been given so far."""
        if (stream := self._streams.get(device)) is not None:
            stream.wait_stream(torch.accelerator.current_stream(device))

    def _may_copy(self, size: int) -> bool:
        """Return whether copies that are under way leave room for this one. To ask an event waits for nothing."""
        while self._copies and self._copies[0][0].query():
            self._copied_bytes -= self._copies.popleft()[1].nbytes
        return self._copied_bytes + size <= _COPIED_BYTES

    def read_devices(self) -> None:
        """Read everything that is on a device, in one copy for each device. Waits."""
        waiting = [deferred for deferred in self._deferred if not deferred.numbers.is_meta]
        self._deferred = []
        for device in {deferred.numbers.device for deferred in waiting}:
            try:
                stream = self._streams[device]
                if stream is not None:
                    torch.accelerator.current_stream(device).wait_stream(stream)
                group = [deferred for deferred in waiting if deferred.numbers.device == device]
                rows = torch.stack([deferred.numbers for deferred in group]).tolist()
                for deferred, numbers in zip(group, rows, strict=True):
                    _fill(deferred.leaf, as_statistics(numbers, deferred.dtype, deferred.shape, deferred.repeats))
            except Exception as error:  # the other devices can be read all the same
                self.note_error(f"reading {device}", error)
        self._copies.clear()
        self._copied_bytes = 0

    def _memory_of(self, tensor: Tensor) -> Leaf:
        try:
            device, storage = tensor.device, tensor.untyped_storage()
            return {
                "device": text(device),
                "stride": list(tensor.stride()),
                "data_ptr": tensor.data_ptr(),
                "storage_offset": tensor.storage_offset(),
                "storage_ptr": storage.data_ptr(),
                "storage_bytes": storage.nbytes(),
                "storage_id": self._number_of(storage),
                "stream": None if tensor.is_cpu else stream_number(device),
            }
        except Exception:  # it has no storage: wrapped, fake
            return {"device": text(tensor.device)}

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        """Return a storage's number, which is never given again, as an address is: a weak reference holds the key."""
        key = storage_id(storage)
        if key not in self._storages:
            self._storages[key] = next(_storage_numbers), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return self._storages[key][0]


def _fill(leaf: Leaf, statistics: Leaf) -> None:
    leaf.update(statistics)
    if "nnz" in leaf:  # it would be an index into the stored elements
        leaf["first_bad"] = None


def _is_on_host(values: Tensor) -> bool:
    return values.is_cpu


def plain_values(tensor: Tensor) -> Tensor | None:
    """Return the numbers that this rank holds, as a plain strided tensor; None where they cannot be read."""
    kind: Any = type(tensor)
    if is_functorch_tensor(tensor):  # inside torch.func: it has no value
        return None
    if kind is not Tensor and any(base.__name__ in ("FakeTensor", "FunctionalTensor") for base in kind.__mro__):
        return None
    if tensor.layout is not torch.strided or hasattr(tensor, "placements") or tensor.is_nested:
        tensor = held_values(tensor)
    return tensor if tensor.layout is torch.strided and not tensor.is_quantized and _has_storage(tensor) else None


def _has_storage(tensor: Tensor) -> bool:
    """Return False for zeros that are not stored, and inside of batched gradients."""
    if tensor.is_meta or type(tensor) not in _PLAIN:
        return True
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


# -- numbers ----------------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)  # others need not have a list of their numbers
_UNCONVERTED = (torch.float32, torch.float64)  # are measured in their own type
_BOOL_BYTES = torch.uint8  # of a bool tensor; to convert one takes too much memory
_FEW_ELEMENTS = 32  # Python has measured so few before torch has begun
_ONE_PASS_ELEMENTS = 1 << 16  # elements, of which both ends are sooner known from one pass
_CACHE_ELEMENTS = 1 << 18  # elements for each thread: 1 MiB of float32 stays in its cache
_DOT_ELEMENTS = 1 << 16  # elements of one dot product, which a processor may sum in float32 one after another
_SMALLEST_SQUARE = 1e-30  # a float32 below has few bits left: the squares may have been lost


def host_numbers(tensor: Tensor, shape: Sequence[int]) -> Sequence[float]:
    """Return what `device_numbers` does, of a tensor in host memory, with as few passes over it as possible."""
    values = _as_real(tensor)
    is_small = values.numel() <= _FEW_ELEMENTS and type(values) in _PLAIN
    numbers = _measure_few(values) if is_small else _measure_many(_flat(values))
    if numbers is None:
        result: list[float] = device_numbers(tensor, shape).tolist()
        largest = max(map(abs, result[:2]))
        if result[3] in (0.0, math.inf) and 0.0 < largest < math.inf:  # the squares of float64 have left its range
            result[3] = largest * torch.linalg.vector_norm(values.double() / largest).item()
        return result
    return [*numbers, 0, 0, 0, *map(float, _measure_others(values, shape))]


def device_numbers(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the numbers of all statistics, on the tensor's device. Nothing waits, and no value decides what is run.

    Args:
        tensor: with at least one element.
        shape: that of the whole, of which ``tensor`` is what `without_repeats` leaves.
    """
    values, wide = _as_real(tensor), widest_float(tensor.device)
    low, high = torch.aminmax(values)
    if values.dtype is _BOOL_BYTES:
        numbers = [high, low, *[torch.zeros_like(low)] * 5]
    else:
        bad, nans = values.isfinite().logical_not_(), values.isnan().sum()
        mean, norm = values.mean(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)
        numbers = [high, low, mean, norm, nans, bad.sum() - nans, bad.flatten().view(torch.uint8).argmax()]
    return torch.stack([number.to(wide) for number in (*numbers, *_measure_others(values, shape))])


# The statistics of the first rows are measured together; behind them come those of rows with a ``measure``.
_MEASURED_TOGETHER = 7


def _measure_others(values: Tensor, shape: Sequence[int]) -> list[Tensor]:
    measures = [row.measure for row in STATISTICS[_MEASURED_TOGETHER:] if row.measure is not None]
    return [measure((values.float() if values.dtype is _BOOL_BYTES else values).expand(shape)) for measure in measures]


def as_statistics(numbers: Sequence[float], dtype: torch.dtype, shape: Sequence[int], repeats: int) -> Leaf:
    """Return the numbers of a tensor as they are written; each element of this shape is there so often."""
    high, low, mean, norm, nans, infs, first, *others = numbers
    is_bool = dtype is torch.bool
    norm = norm * math.sqrt(repeats) if shape else high
    values: list[Any] = [
        bool(high) if is_bool else high,
        bool(low) if is_bool else low,
        None if is_bool else mean,
        None if is_bool or dtype.is_complex else norm,
        int(nans) * repeats,
        int(infs) * repeats,
        _index_of(int(first), shape) if nans or infs else None,
        *others,
    ]
    if not math.isfinite(sum(numbers) + norm):  # as it is wherever a number is not finite
        values = [as_json(value) if type(value) is float else value for value in values]
    return {row.key: value for row, value in zip(STATISTICS, values, strict=True)}


def _as_real(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    if dtype in _UNCONVERTED:
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    if dtype.is_complex:  # a magnitude may be too large for the type of its parts
        return tensor.to(torch.promote_types(tensor.dtype, widest_float(tensor.device))).abs()
    if dtype is torch.bool:
        return tensor.view(_BOOL_BYTES)
    return tensor.float() if dtype.is_floating_point else tensor.to(widest_float(tensor.device))


def _measure_few(values: Tensor) -> tuple[float, ...] | None:
    numbers = values.flatten().tolist()
    try:
        mean = math.fsum(numbers) / len(numbers)
    except (OverflowError, ValueError):  # of what is finite, or infinities of both signs
        return None
    return (max(numbers), min(numbers), mean, math.hypot(*numbers)) if math.isfinite(mean) else None


def _measure_many(flat: Tensor) -> tuple[float, ...] | None:
    """Return largest, smallest, mean and norm; None where anything is not finite, or float32 cannot hold the sums.

    All passes are made over a part that stays in the processor's cache before the next part is read: 4 MiB take a
    quarter less time. In it `amin` and `amax` are faster than `aminmax`, but not for few elements, nor for bytes.
    """
    if flat.dtype is _BOOL_BYTES:
        low, high = torch.aminmax(flat)
        return high.item(), low.item(), 0.0, 0.0
    total, square, ends = 0.0, 0.0, []
    for cached in _parts(flat, _CACHE_ELEMENTS * torch.get_num_threads()):
        total += cached.sum().item()
        if not math.isfinite(total):  # as it is wherever an element is not finite
            return None
        square += sum([torch.dot(part, part).item() for part in _parts(cached, _DOT_ELEMENTS)])
        low, high = torch.aminmax(cached) if cached.numel() < _ONE_PASS_ELEMENTS else (cached.amin(), cached.amax())
        ends += [low.item(), high.item()]
    most, least = max(ends), min(ends)
    if not (_SMALLEST_SQUARE <= square < math.inf or least == most == 0):
        return None
    return most, least, total / flat.numel(), math.sqrt(square)


def _parts(flat: Tensor, size: int) -> Sequence[Tensor]:
    return torch.split(flat, size) if flat.numel() > size else (flat,)


def _flat(values: Tensor) -> Tensor:
    """Return all elements in one dimension, in any order."""
    if values.is_contiguous():
        return values.view(-1)
    if is_dense(values.shape, values.stride()):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def _index_of(position: int, shape: Sequence[int]) -> list[int]:
    return [int(index) for index in torch.unravel_index(torch.tensor(position, device="cpu"), tuple(shape))]


# -- arguments and results --------------------------------------------------------------------------------------------

_DEEPEST = 8
_MOST_ITEMS = 1_000  # that are no tensors: a list of a million numbers is data, and no argument
_MOST_CHARACTERS = 1_000  # of a string: a document is data as well
_SCALARS = (bool, int, float, str)
_LEAVES = (*_SCALARS, torch.Size)
_AS_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, complex)


class EntryLeaves:
    """Makes the leaves of one entry at one moment."""

    def __init__(self, maker: TensorSummaries, name: str, is_saved: bool, moment: int) -> None:
        self._maker, self._name, self._is_saved, self._moment = maker, name, is_saved, moment
        self._measured: dict[int, Leaf] = {}
        self._paths: set[str] = set()

    def of(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return ``value`` as plain data; ``path`` is where it is in the entry."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        items = _items_of(value, depth)
        if items is None:
            return None if value is None else _describe_value(value)
        leaves = {}
        is_list = isinstance(value, (list, tuple))
        for key, item in items.items():
            name, inside = str(key), f"{path}.{key}"
            while inside in self._paths:  # {1: x, "1": y}, or {"a.b": x, "a": {"b": y}}
                name, inside = f"{name}_", f"{inside}_"
                is_list = False  # {"a.0": x, "a": [y]}: the list is written by its new names
            self._paths.add(inside)
            leaves[name] = self.of(item, inside, depth + 1)
        return list(leaves.values()) if is_list else leaves

    def _tensor(self, tensor: Tensor, path: str) -> Leaf:
        leaf = self._measured.get(id(tensor))
        if leaf is None or self._is_saved or self._maker.deferred_count:
            leaf = self._maker.describe(tensor, self._name, path, self._is_saved, self._moment)
            self._measured[id(tensor)] = leaf
            return leaf
        return dict(leaf)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield every leaf of arguments or results, in order. A long list of what is no tensor is one leaf."""
    items = None if isinstance(value, Tensor) else _items_of(value, depth)
    if items is None:
        yield value
    else:
        for item in items.values():
            yield from tensors_in(item, depth + 1)


def _items_of(value: Any, depth: int) -> Mapping[Any, Any] | None:
    """Return what a list, tuple, dict or dataclass holds, by its index or name; None of what is one leaf."""
    if value is None or isinstance(value, _LEAVES) or depth >= _DEEPEST:
        return None
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value)) if len(value) <= _MOST_ITEMS or isinstance(value[0], Tensor) else None
    if not isinstance(value, (dict, UserDict)):
        if not hasattr(type(value), "__dataclass_fields__"):
            return None
        return {name: getattr(value, name) for name in set_fields(value)}
    return value if len(value) <= _MOST_ITEMS or isinstance(next(iter(value.values())), Tensor) else None


def _describe_value(value: Any) -> Leaf:
    kind = type(value).__name__
    numpy = sys.modules.get("numpy")  # a program that has not loaded it holds none of its numbers
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, _SCALARS):
        short = value[:_MOST_CHARACTERS] if isinstance(value, str) else value
        plain = short if type(short) in _SCALARS else _as_number(short)
        return {"type": kind, "value": as_json(plain) if type(plain) is float else plain}
    if isinstance(value, torch.Size):  # under tracing a size may be a symbol
        return {"type": "torch.Size", "value": [size if type(size) is int else str(size) for size in value]}
    if isinstance(value, (list, tuple, dict)):
        return {"type": kind, "length": len(value)}
    if isinstance(value, slice):
        ends = value.start, value.stop, value.step
        return {"type": kind, "value": [end if end is None or type(end) is int else type(end).__name__ for end in ends]}
    if value is Ellipsis:
        return {"type": "ellipsis", "value": "..."}
    if isinstance(value, _AS_TEXT):
        return {"type": kind if isinstance(value, complex) else f"torch.{kind}", "value": str(value)}
    return {"type": kind}


def _as_number(value: Any) -> int | float | str:
    """Return a number of another class, such as an enum's, as Python's."""
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str(value)


@functools.cache
def text(value: Any) -> str:
    """Return ``str`` of a dtype, layout or device; torch takes 10 microseconds for a device."""
    return str(value)
