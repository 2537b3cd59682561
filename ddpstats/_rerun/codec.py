"""A batch as plain things, which ``torch.load(weights_only=True)`` can load, and back.

1. None, bool, int, float and str stay what they are; a list stays a list.
2. Everything else becomes a dict with a "kind": tensors, tuples, dicts, arrays. So no dict of the user's can be taken
   for one of ours: his are always inside "items".
3. A tensor is detached and copied to the CPU, only the elements that it shows; a mark says whether it was on an
   accelerator, and whether it required a gradient.
4. Back: the same, but for types of the user's own. A namedtuple comes back as another namedtuple of the same name and
   fields, a dataclass as a `types.SimpleNamespace`, any mapping as a dict: importing his types from a file that a
   stranger may have written would run code.

`from_plain` trusts nothing: kinds, types, sizes, depth and number of things are looked at.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ddpstats._rerun.record import set_fields
from ddpstats.errors import BundleError

_MOST_DEEP = 64
_MOST_THINGS = 5_000_000
_MOST_FIELDS = 10_000
_ARRAY_KINDS = "biufcMmUS"
_ARRAY_DTYPE = re.compile(rf"[<>|=]?[{_ARRAY_KINDS}]\d{{1,6}}(\[\d{{0,9}}[A-Za-z]{{1,2}}\])?")
_PLAIN_TENSOR = torch.Tensor.__torch_dispatch__


class CannotStore(Exception):
    """Raised when a batch holds something that could be stored by pickle only."""

    def __init__(self, path: str, type_name: str) -> None:
        super().__init__(
            f"{path} is {type_name}, which cannot be kept as plain data: loading it again would run code. Make it "
            "tensors, arrays, numbers, strings, lists, tuples, dicts or dataclasses of these, or leave the batch out."
        )
        self.path = path


# -- to plain things --------------------------------------------------------------------------------------------------


def to_plain(value: Any, path: str = "batch") -> Any:
    """Local. Raises `CannotStore`, which names the path (``batch['x'][0]``) and the type."""
    return _plain(value, path, 0)


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > _MOST_DEEP:
        raise CannotStore(path, f"{_type_name(value)} that is nested deeper than {_MOST_DEEP} levels")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, path)
    if isinstance(value, (bytes, bytearray)):
        return {"kind": type(value).__name__, "data": _bytes_tensor(bytes(value))}
    if type(value) is complex:
        return {"kind": "complex", "real": value.real, "imag": value.imag}
    numpy = sys.modules.get("numpy")  # a program that has not loaded it holds none of its arrays
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _plain_array(value, path)
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, depth)
    if isinstance(value, (list, tuple)):
        return _plain_sequence(value, path, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_dataclass(value, path, depth)
    raise CannotStore(path, _type_name(value))


def _plain_tensor(value: torch.Tensor, path: str) -> dict[str, Any]:
    ordinary = type(value).__torch_dispatch__ is _PLAIN_TENSOR and value.layout is torch.strided
    if not ordinary or value.is_quantized or value.device.type == "meta":
        raise CannotStore(path, f"{_type_name(value)} ({value.layout}, {value.device})")
    here = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    # preserve_format: channels_last stays, since other strides are other kernels and other last bits
    copy = here.clone(memory_format=torch.preserve_format) if here.device.type == "cpu" else here.to("cpu")
    if copy.untyped_storage().nbytes() != copy.numel() * copy.element_size():
        copy = copy.contiguous().clone()
    accelerator = value.device.type != "cpu"
    return {"kind": "tensor", "data": copy, "accelerator": accelerator, "requires_grad": value.requires_grad}


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _plain_array(value: Any, path: str) -> dict[str, Any]:
    if value.dtype.kind not in _ARRAY_KINDS or _ARRAY_DTYPE.fullmatch(value.dtype.str) is None:
        raise CannotStore(path, f"{_type_name(value)} of dtype {value.dtype}")
    kind = "array" if hasattr(value, "setflags") and type(value).__name__ == "ndarray" else "scalar"
    if kind == "scalar" and value.ndim:
        raise CannotStore(path, _type_name(value))  # a subclass of ndarray: masked, matrix, memory map
    data = {"data": _bytes_tensor(value.tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}
    return {"kind": kind, **data}


def _plain_mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    items = []
    for key, content in value.items():
        where = f"{path}[{key!r}]"
        if not _is_key(key):
            raise CannotStore(f"the key {key!r} of {path}", _type_name(key))
        items.append([_plain(key, where, depth + 1), _plain(content, where, depth + 1)])
    return {"kind": "dict", "items": items}


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, complex, str, bytes)


def _plain_sequence(value: list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        items = [_plain(content, f"{path}.{name}", depth + 1) for name, content in zip(fields, value, strict=True)]
        if isinstance(value, PackedSequence):
            return {"kind": "packed", "items": items}
        return {"kind": "namedtuple", "name": type(value).__name__, "fields": list(fields), "items": items}
    items = [_plain(content, f"{path}[{place}]", depth + 1) for place, content in enumerate(value)]
    if type(value) is list:
        return items
    if type(value) in (tuple, torch.Size):
        return {"kind": "tuple" if type(value) is tuple else "size", "items": items}
    raise CannotStore(path, _type_name(value))


def _plain_dataclass(value: Any, path: str, depth: int) -> dict[str, Any]:
    names = set_fields(value)
    items = [_plain(getattr(value, name), f"{path}.{name}", depth + 1) for name in names]
    return {"kind": "object", "name": type(value).__name__, "fields": names, "items": items}


def _type_name(value: Any) -> str:
    kind = type(value)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of type {home}{kind.__qualname__}"


# -- and back ---------------------------------------------------------------------------------------------------------


def from_plain(plain: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """What `to_plain` was given. Local; everything in it is a copy.

    ``device``: where tensors go that were on an accelerator; None leaves them on the CPU. ``dtype``: of the floating
    ones; None leaves them as they were.

    Raises `BundleError` for anything that `to_plain` does not write.
    """
    return _Rebuilding(device, dtype).rebuild(plain, "batch", 0)


def checked_tensor(value: Any, where: str) -> torch.Tensor:
    """An ordinary tensor on the CPU that holds as many elements as it shows. Raises `BundleError` naming ``where``.

    A file of a few bytes can hold a tensor of any shape whose strides are 0: whoever copies it runs out of memory.
    """
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        raise BundleError(f"{where}: an ordinary tensor on the CPU should stand here, not {_shown(value)}")
    if value.is_quantized or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise BundleError(f"{where}: the tensor shows more elements than it holds; the bundle is damaged or hostile")
    return value


class _Rebuilding:
    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._things = 0
        self._seen: set[int] = set()  # where each tensor's memory begins

    def rebuild(self, plain: Any, path: str, depth: int) -> Any:
        self._things += 1
        if depth > 2 * _MOST_DEEP or self._things > _MOST_THINGS:
            raise BundleError(f"{path}: too many things, or too deep; the bundle is damaged or hostile")
        if plain is None or type(plain) in (bool, int, float, str):
            return plain
        if type(plain) is list:
            return self._items(plain, path, depth)
        if type(plain) is not dict:
            raise BundleError(f"{path}: {_shown(plain)} is not what ddpstats writes")
        kind = plain.get("kind")
        how = _KINDS.get(kind) if type(kind) is str else None
        if how is None:
            raise BundleError(f"{path}: kind {_cut(kind)} is not one that ddpstats writes")
        try:
            return how(self, plain, path, depth)
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError, OverflowError) as error:
            raise BundleError(f"{path}: not a {kind}: {type(error).__name__}: {error}") from None

    def _items(self, plain: Any, path: str, depth: int) -> list[Any]:
        if type(plain) is not list:
            raise BundleError(f"{path}: {_shown(plain)} where a list should stand")
        return [self.rebuild(content, f"{path}[{place}]", depth + 1) for place, content in enumerate(plain)]

    def _tensor(self, plain: dict[str, Any], path: str, depth: int) -> torch.Tensor:
        data = self._once(checked_tensor(plain["data"], path), path)
        to_device = self._device if _flag(plain, "accelerator") else None
        copy = data.to(to_device, self._dtype if data.is_floating_point() else None, copy=True)
        return copy.requires_grad_() if _flag(plain, "requires_grad") else copy

    def _once(self, data: torch.Tensor, path: str) -> torch.Tensor:
        """Each is copied: a file in which many things are one tensor would take many times its size."""
        place = data.untyped_storage().data_ptr()
        if data.numel() and place in self._seen:
            raise BundleError(f"{path}: a tensor that stands elsewhere, too; the bundle is damaged or hostile")
        self._seen.add(place)
        return data

    def _bytes_of(self, plain: dict[str, Any], path: str) -> bytes:
        data = self._once(checked_tensor(plain["data"], path), path)
        if data.dtype is not torch.uint8 or data.dim() != 1:
            raise BundleError(f"{path}: bytes should stand here, not {data.dtype} of shape {tuple(data.shape)}")
        if not data.numel():
            return b""
        buffer = bytearray(data.numel())
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(data)
        return bytes(buffer)

    def _bytes(self, plain: dict[str, Any], path: str, depth: int) -> bytes | bytearray:
        data = self._bytes_of(plain, path)
        return data if plain["kind"] == "bytes" else bytearray(data)

    def _complex(self, plain: dict[str, Any], path: str, depth: int) -> complex:
        return complex(float(plain["real"]), float(plain["imag"]))

    def _array(self, plain: dict[str, Any], path: str, depth: int) -> Any:
        try:
            import numpy
        except ImportError:
            raise BundleError(f"{path} is an array of numpy, which is not installed here: pip install numpy") from None
        dtype, shape = plain["dtype"], plain["shape"]
        if type(dtype) is not str or _ARRAY_DTYPE.fullmatch(dtype) is None:
            raise BundleError(f"{path}: dtype {_cut(dtype)} is not one that ddpstats writes")
        if type(shape) is not list or len(shape) > 64 or any(type(size) is not int or size < 0 for size in shape):
            raise BundleError(f"{path}: shape {_cut(shape)} is not one")
        array = numpy.frombuffer(self._bytes_of(plain, path), dtype=numpy.dtype(dtype)).reshape(shape).copy()
        return array if plain["kind"] == "array" else array[()]

    def _dict(self, plain: dict[str, Any], path: str, depth: int) -> dict[Any, Any]:
        rebuilt: dict[Any, Any] = {}
        for pair in plain["items"]:
            if type(pair) is not list or len(pair) != 2:
                raise BundleError(f"{path}: an item is not a key and a value")
            key = self.rebuild(pair[0], path, depth + 1)
            if not _is_key(key):
                raise BundleError(f"{path}: {_shown(key)} cannot be a key")
            rebuilt[key] = self.rebuild(pair[1], f"{path}[{_cut(key)}]", depth + 1)
        return rebuilt

    def _tuple(self, plain: dict[str, Any], path: str, depth: int) -> tuple[Any, ...]:
        items = self._items(plain["items"], path, depth)
        return tuple(items) if plain["kind"] == "tuple" else torch.Size(items)

    def _packed(self, plain: dict[str, Any], path: str, depth: int) -> PackedSequence:
        data, batch_sizes, sorted_indices, unsorted_indices = self._items(plain["items"], path, depth)
        return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)

    def _named(self, plain: dict[str, Any], path: str, depth: int) -> Any:
        name, fields = plain["name"], plain["fields"]
        items = self._items(plain["items"], path, depth)
        if not _is_identifier(name) or type(fields) is not list or not all(map(_is_identifier, fields)):
            raise BundleError(f"{path}: names that are no names: {_cut(name)}, {_cut(fields)}")
        if len(fields) != len(items) or len(set(fields)) != len(fields) or len(fields) > _MOST_FIELDS:
            raise BundleError(f"{path}: {len(fields)} fields and {len(items)} values")
        if plain["kind"] == "object":
            return types.SimpleNamespace(**dict(zip(fields, items, strict=True)))
        # rename: a tuple made with it has fields such as _1, which are refused otherwise
        return collections.namedtuple(name, fields, rename=True)(*items)


_KINDS: dict[str, Callable[[_Rebuilding, dict[str, Any], str, int], Any]] = {
    "tensor": _Rebuilding._tensor,
    "bytes": _Rebuilding._bytes,
    "bytearray": _Rebuilding._bytes,
    "complex": _Rebuilding._complex,
    "array": _Rebuilding._array,
    "scalar": _Rebuilding._array,
    "dict": _Rebuilding._dict,
    "tuple": _Rebuilding._tuple,
    "size": _Rebuilding._tuple,
    "packed": _Rebuilding._packed,
    "namedtuple": _Rebuilding._named,
    "object": _Rebuilding._named,
}


def _flag(plain: dict[str, Any], name: str) -> bool:
    if type(plain[name]) is not bool:
        raise TypeError(f"{name} is neither true nor false")
    return plain[name] is True


def _is_identifier(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and len(name) <= 1000


def _shown(value: Any) -> str:
    return f"something of type {type(value).__qualname__}"


def _cut(value: Any) -> str:
    text = repr(value) if type(value) in (str, int, bool, float, bytes, type(None), list) else _shown(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
