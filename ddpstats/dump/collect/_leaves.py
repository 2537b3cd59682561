"""Arguments and results as plain data: what a tensor is, its statistics and its place in memory.

The shape of arguments is kept: lists, tuples and dicts become lists and dicts, with a leaf for everything else.

1. What is known of a tensor at once is put into its leaf.
2. Statistics of a tensor in host memory are put in at once as well. On a device they are computed into one small
   tensor there (`_Deferred`), which `TensorSummaries.settle` reads, all of them in one copy.
3. A tensor in host memory that comes twice at one moment of one entry is looked at once. Nothing is remembered beyond
   that: memory that somebody overwrote in the meantime must not look as it was.

On CUDA the numbers are computed on a stream of their own, from a copy made on the program's: the copy is in order with
what the program writes there before and after, so that what is measured is what the program itself would have read.
Where many copies are not through yet (`CopiesInFlight`) the numbers are computed on the program's stream, without one.
While a CUDA graph is captured nothing is measured: it would become part of the graph.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ddpstats._observe.torch_compat import storage_id
from ddpstats._reduction.read import is_capturing
from ddpstats.dump.collect._argument_json import (
    DEEPEST,
    MOST_ITEMS,
    SCALARS,
    named_parts,
    other,
    plain,
    scalar,
    size_of,
    text,
)
from ddpstats.dump.collect._tensor_stats import (
    NOTHING,
    Stats,
    device_stats,
    host_stats,
    of_numbers,
    plain_values,
)
from ddpstats.dump.format._entries import STATISTICS
from ddpstats.dump.format._tensor_files import TensorFiles, checksum, without_repeats

Leaf = dict[str, Any]

_HOST_BYTES = 1_200  # of a leaf as a dict, roughly
_ENTRY_BYTES = 1_000  # and of an entry besides its leaves
_DEVICE_BYTES = 512  # the smallest block of CUDA's allocator
_SCALAR_BYTES = 300
_OUR_KEYS = ("nan_count", "inf_count", "first_bad")
_UNKNOWN = dict.fromkeys(STATISTICS)
_numbers = itertools.count(1)  # of storages


@dataclass
class _Deferred:
    """A leaf whose statistics are on a device."""

    leaf: Leaf
    numbers: Tensor
    dtype: torch.dtype
    shape: torch.Size
    repeats: int = 1


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(kw_only=True, eq=False)
class TensorSummaries:
    """Makes leaves for one step.

    Args:
        md5: whether leaves have a checksum.
        files: where tensors are saved.
        saves: whether the tensors of an entry of this name are saved.
        max_bytes: what may be held at once; None for no limit. After the first that no longer fits nothing has numbers.
        note_error: told of a leaf that failed: where, and why.

    Attributes:
        waiting: how many leaves have their statistics on a device.
        held_bytes: roughly what the step holds.
        first_dropped: the name of the first entry of which something was not kept.
    """

    md5: bool
    files: TensorFiles
    saves: Callable[[str], bool]
    max_bytes: int | None
    note_error: Callable[[str, Exception], None]
    held_bytes: int = 0
    first_dropped: str | None = None
    _storages: dict[int, tuple[int, StorageWeakRef]] = field(default_factory=dict)
    _deferred: list[_Deferred] = field(default_factory=list)
    _streams: dict[torch.device, Any] = field(default_factory=dict)
    _copies: CopiesInFlight = field(default_factory=lambda: CopiesInFlight())

    @property
    def waiting(self) -> int:
        return len(self._deferred)

    def of_entry(self, name: str) -> EntryLeaves:
        """Leaves of the entry ``name``, for the tensors as they are now."""
        return EntryLeaves(self, name, self.saves(name))

    def tensor(self, tensor: Tensor, name: str, path: str, is_saved: bool) -> Leaf:
        leaf: Leaf = {"type": "torch.Tensor"}
        try:
            values = plain_values(tensor)
            _describe(leaf, tensor, values)
            if values is not None and self._fits(values, name, is_saved):
                # of a sparse tensor only what it stores could be saved, which has another shape: the statistics stay
                self._fill(leaf, values, name, path, is_saved and tensor.layout not in _SPARSE)
        except Exception as error:
            self.note_error(f"{name}.{path}", error)
        if is_saved or self.md5:
            for key in _OUR_KEYS:  # after those of the format, which have come late
                leaf[key] = leaf.pop(key, None)
        leaf.update(self._memory(tensor))
        return leaf

    def entry_fits(self, name: str) -> bool:
        """Whether what else is in an entry can be held as well; called as it is complete."""
        self._take(_ENTRY_BYTES, name)
        return self.first_dropped is None or self.first_dropped == name

    def release(self) -> None:
        """What was held is written."""
        self.held_bytes = 0

    def _fill(self, leaf: Leaf, values: Tensor, name: str, path: str, is_saved: bool) -> None:
        if not values.is_cpu and is_capturing():
            return
        if values.numel():
            self._measure(leaf, values)
        if is_saved and not values.is_meta:
            leaf["data_name"] = self.files.save(values, name, path)
        if self.md5 and not values.is_meta:
            leaf["md5"] = checksum(values)

    def _measure(self, leaf: Leaf, values: Tensor) -> None:
        if _is_on_host(values):
            _put(leaf, host_stats(values))
        else:
            held, repeats = without_repeats(values)
            self._deferred.append(_Deferred(leaf, self._on_device(held), held.dtype, held.shape, repeats))

    def _fits(self, values: Tensor, name: str, is_saved: bool) -> bool:
        if self.max_bytes is None:
            return True
        needed = _HOST_BYTES + (0 if _is_on_host(values) else _DEVICE_BYTES)
        if is_saved:
            needed += without_repeats(values)[0].numel() * values.element_size()
        return self._take(needed, name)

    def scalar(self, name: str) -> None:
        """One more is held."""
        self._take(_SCALAR_BYTES, name)

    def _take(self, needed: int, name: str) -> bool:
        if self.max_bytes is None:
            return True
        if self.first_dropped is None and self.held_bytes + needed > self.max_bytes:
            self.first_dropped = name
        if self.first_dropped is not None:
            return False
        self.held_bytes += needed
        return True

    def _on_device(self, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return device_stats(values)
        device = values.device
        if not self._copies.may_add(values.numel() * values.element_size(), device):
            return device_stats(values)  # where the program waits for it, but needs no memory for a copy
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copy = values.detach().clone()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            numbers = device_stats(copy)
        copy.record_stream(stream)
        self._copies.add(copy.numel() * copy.element_size(), device, stream.record_event())
        return numbers

    def settle(self) -> None:
        """Read everything that is on a device, in one copy for each device. Waits."""
        deferred, self._deferred = self._deferred, []
        by_device: dict[torch.device, list[_Deferred]] = {}
        for one in deferred:
            if not one.numbers.is_meta:
                by_device.setdefault(one.numbers.device, []).append(one)
        for device, these in by_device.items():
            try:
                self._read(device, these)
            except Exception as error:  # the others can be read all the same
                self.note_error(f"reading {device}", error)

    def _read(self, device: torch.device, deferred: list[_Deferred]) -> None:
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        for one, numbers in zip(deferred, _stacked([one.numbers for one in deferred]).tolist(), strict=True):
            _put(one.leaf, of_numbers(numbers, one.dtype, one.shape, one.repeats))

    def _memory(self, tensor: Tensor) -> Leaf:
        try:
            if hasattr(tensor, "placements"):
                tensor = tensor.to_local()  # type: ignore[attr-defined]
            storage = tensor.untyped_storage()
            return {
                "device": text(tensor.device),
                "stride": [size_of(stride) for stride in tensor.stride()],
                "data_ptr": tensor.data_ptr(),
                "storage_offset": size_of(tensor.storage_offset()),
                "storage_ptr": storage.data_ptr(),
                "storage_bytes": size_of(storage.nbytes()),
                "storage_id": self._number_of(storage),
                "stream": _current_stream(tensor.device),
            }
        except Exception:  # no storage of its own: sparse, wrapped, fake
            return {"device": text(tensor.device)}

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        """An address is given again when memory is freed, the number is not: what names a storage is held, weakly."""
        key = storage_id(storage)
        if key not in self._storages:
            self._storages[key] = next(_numbers), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return self._storages[key][0]


class EntryLeaves:
    """Leaves of one entry at one moment."""

    def __init__(self, maker: TensorSummaries, name: str, is_saved: bool) -> None:
        self._maker, self._name, self._is_saved = maker, name, is_saved
        self._seen: dict[int, Leaf] = {}
        self._items_left = MOST_ITEMS

    def of(self, value: Any, path: str, depth: int = 0) -> Any:
        """``value`` as plain data; ``path`` is where it is in the entry."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if value is None:
            return None
        if isinstance(value, SCALARS):
            self._maker.scalar(self._name)
            return scalar(value)
        if isinstance(value, torch.Size):
            return {"type": "torch.Size", "value": [plain(size) for size in value]}
        if depth < DEEPEST:
            if isinstance(value, (list, tuple)):
                if self._are_too_many(value):
                    return {"type": type(value).__name__, "length": len(value)}
                return [self.of(item, f"{path}.{place}", depth + 1) for place, item in enumerate(value)]
            named = named_parts(value)
            if named is not None:
                if self._are_too_many(list(named.values())):
                    return {"type": type(value).__name__, "length": len(named)}
                return {str(key): self.of(item, f"{path}.{key}", depth + 1) for key, item in named.items()}
        return other(value)

    def _are_too_many(self, items: list[Any] | tuple[Any, ...]) -> bool:
        if items and isinstance(items[0], Tensor):
            return False
        if len(items) > self._items_left:
            return True
        self._items_left -= len(items)
        return False

    def _tensor(self, tensor: Tensor, path: str) -> Leaf:
        found = self._seen.get(id(tensor))
        if found is None or self._is_saved or self._maker.waiting:
            found = self._seen[id(tensor)] = self._maker.tensor(tensor, self._name, path, self._is_saved)
            return found
        return dict(found)


def _is_on_host(values: Tensor) -> bool:
    return values.is_cpu


def _stacked(numbers: list[Tensor]) -> Tensor:
    return torch.stack(numbers)


def _describe(leaf: Leaf, tensor: Tensor, values: Tensor | None) -> None:
    """What holds without looking at a number. A ragged tensor's shape is that of the numbers it holds."""
    is_ragged = tensor.is_nested and values is not None
    leaf.update(
        dtype=text(tensor.dtype),
        shape=[size_of(size) for size in (values if is_ragged and values is not None else tensor).shape],
        **_UNKNOWN,
        requires_grad=tensor.requires_grad,
        **dict.fromkeys(_OUR_KEYS),
    )
    if is_ragged:
        leaf["layout"] = "nested"
    elif hasattr(tensor, "placements"):  # a DTensor: the numbers are those of this rank's part
        leaf["device_mesh"] = tensor.device_mesh.mesh.tolist() if hasattr(tensor, "device_mesh") else None
        leaf["placements"] = [str(one) for one in tensor.placements]
        leaf["local_shape"] = None if values is None else list(values.shape)


def _put(leaf: Leaf, stats: Stats) -> None:
    if stats is NOTHING:
        return
    leaf.update(zip((*STATISTICS, *_OUR_KEYS), stats, strict=True))


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).stream_id) if device.type == "cuda" else 0


_MOST_BYTES = 256 << 20


class CopiesInFlight:
    """A copy is in flight until its event has happened; to ask an event waits for nothing."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, deque[tuple[Any, int]]] = {}
        self._bytes: dict[torch.device, int] = {}

    def may_add(self, size: int, device: torch.device) -> bool:
        """Whether one more of this size stays within the limit."""
        copies = self._copies.get(device, ())
        while copies and copies[0][0].query():
            self._bytes[device] -= copies.popleft()[1]
        return self._bytes.get(device, 0) + size <= _MOST_BYTES

    def add(self, size: int, device: torch.device, event: Any) -> None:
        """``event`` happens when the copy is no longer needed."""
        self._copies.setdefault(device, deque()).append((event, size))
        self._bytes[device] = self._bytes.get(device, 0) + size
