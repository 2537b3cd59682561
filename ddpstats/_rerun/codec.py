"""Values as safetensors: tensors as they are, the rest as JSON beside them, in a file or on the way to another rank.

1. `to_plain` makes a user's batch plain: None, bool, int, float, str and lists stay; any other value becomes a dict
   with a "kind", so that no dict of the user's can be taken for one of these. A tensor is detached and copied to the
   CPU, only the elements that it shows; it is marked if it was on an accelerator or required a gradient.
2. `write` takes dataclasses of such values. Each tensor is stored once, under a number; the tensor "json"
   holds the rest, in which {"$tensor": number} refers to it. Tensors go to the host one at a time.
3. `read` makes the dataclass again. What it reads is untrusted: sizes and types are checked, and nothing is executed.
   `to_bytes` and `from_bytes` do the same in memory.
4. `from_plain` rebuilds the batch. A namedtuple comes back as another namedtuple of the same name and fields, a
   dataclass as a `types.SimpleNamespace`, any mapping as a dict: importing the user's types could run code.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec
import safetensors
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ddpstats._base.files import parse_json
from ddpstats._base.text import first_line
from ddpstats._ranks.device import bytes_in
from ddpstats._ranks.gather import COMPLEX, MALFORMED, can_store, read_tensors, write_tensors
from ddpstats._rerun.record import set_fields, walk
from ddpstats.errors import BundleError

T = TypeVar("T")

_MAX_DEPTH = 64
_MAX_JSON_BYTES = 64 << 20
_REFERENCE, _JSON = "$tensor", "json"
_KEY_TYPES = (type(None), bool, int, float, complex, str, bytes, tuple)
_ARRAY_KINDS = "biufcMmUS"


class CannotStore(Exception):
    """Raised when a batch holds something that could be stored by pickle only."""

    def __init__(self, path: str, type_name: str) -> None:
        super().__init__(
            f"{path} is {type_name}, which cannot be kept as plain data: loading it again would run code. Make it "
            "tensors, arrays, numbers, strings, lists, tuples, dicts or dataclasses of these, or leave the batch out."
        )
        self.path = path


# -- a batch as plain values ------------------------------------------------------------------------------------------


def to_plain(batch: Any) -> Any:
    """Return plain values for `write`. Raises `CannotStore`, which names the path (``batch['x'][0]``) and the type."""
    return _Plain().convert(batch, "batch", 0)


class _Plain:
    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor that occurs twice is stored once

    def convert(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CannotStore(path, f"{_type_name(value)} that is nested deeper than {_MAX_DEPTH} levels")
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) in (float, complex):
            return {"kind": type(value).__name__, "text": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, (bytes, bytearray)):
            return {"kind": "bytes", "data": _bytes_tensor(value)}
        numpy = sys.modules.get("numpy")  # a program that has not loaded it holds none of its arrays
        if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            return _plain_array(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if type(value) is list:
            return self._items(value, _paths(path, value), depth)
        if isinstance(value, tuple):
            return self._tuple(value, path, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = set_fields(value)
            return self._named_fields("object", value, names, [getattr(value, name) for name in names], path, depth)
        raise CannotStore(path, _type_name(value))

    def _items(self, values: Sequence[Any], paths: Sequence[str], depth: int) -> list[Any]:
        return [self.convert(value, path, depth + 1) for value, path in zip(values, paths, strict=True)]

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if not can_store(value):
            raise CannotStore(path, tensor_text(value))
        if id(value) not in self._copies:
            self._copies[id(value)] = value, _host_copy(value)
        _, copy = self._copies[id(value)]
        is_off_host = value.device.type != "cpu"
        return {"kind": "tensor", "data": copy, "accelerator": is_off_host, "requires_grad": value.requires_grad}

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        items = []
        for key, content in value.items():
            key_path = f"the key {key!r} of {path}"
            if type(key) not in _KEY_TYPES:
                raise CannotStore(key_path, _type_name(key))
            items.append(self._items([key, content], [key_path, f"{path}[{key!r}]"], depth))
        return {"kind": "dict", "items": items}

    def _tuple(self, value: tuple[Any, ...], path: str, depth: int) -> dict[str, Any]:
        names = getattr(type(value), "_fields", None)
        if isinstance(names, tuple):
            kind = "packed" if isinstance(value, PackedSequence) else "namedtuple"
            return self._named_fields(kind, value, list(names), value, path, depth)
        if type(value) not in (tuple, torch.Size):
            raise CannotStore(path, _type_name(value))
        return {"kind": "tuple", "items": self._items(value, _paths(path, value), depth)}

    def _named_fields(
        self, kind: str, value: Any, names: list[str], contents: Sequence[Any], path: str, depth: int
    ) -> dict[str, Any]:
        items = self._items(contents, [f"{path}.{name}" for name in names], depth)
        return {"kind": kind, "name": type(value).__name__, "fields": names, "items": items}


def _paths(path: str, values: Sequence[Any]) -> list[str]:
    return [f"{path}[{index}]" for index in range(len(values))]


def tensor_text(tensor: Tensor) -> str:
    """Return the type of a tensor in words."""
    return f"{_type_name(tensor)} ({tensor.layout}, {tensor.dtype}, {tensor.device})"


def _host_copy(value: Tensor) -> Tensor:
    plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    # preserve_format: channels_last stays, since other strides are other kernels and other last bits
    return plain.clone(memory_format=torch.preserve_format) if plain.device.type == "cpu" else plain.to("cpu")


def _bytes_tensor(data: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _plain_array(value: Any, path: str) -> dict[str, Any]:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise CannotStore(path, f"{_type_name(value)} of dtype {value.dtype}")
    kind = "array" if type(value).__name__ == "ndarray" else "scalar"
    if not value.dtype.itemsize:  # an empty string
        value = sys.modules["numpy"].asarray(value).astype(f"{value.dtype.kind}1")
    return {"kind": kind, "data": _bytes_tensor(value.tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}


def _type_name(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of type {module}{kind.__qualname__}"


# -- in a file --------------------------------------------------------------------------------------------------------


def write(file: BinaryIO, value: Any) -> None:
    """Write a dataclass of plain values and tensors of any device.

    Raises OSError; TypeError that names a tensor which cannot be stored; ValueError for what `read` would refuse.
    """
    tensors: dict[int, tuple[str, Tensor]] = {}

    def plain_of(item: Any) -> Any:
        if dataclasses.is_dataclass(item):
            return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        if not isinstance(item, Tensor):
            return str(item)  # a dtype
        if not can_store(item):
            path = next(path for path, leaf in walk(value, "") if leaf is item)
            raise TypeError(f"{path.removeprefix('.')} is {tensor_text(item)}, which cannot be stored as plain data")
        strides, shape = item.stride(), item.shape
        order = sorted(range(item.dim()), key=lambda dim: (-strides[dim], -shape[dim]))
        tensor, more = item.detach().resolve_conj().resolve_neg().permute(order), dict[str, Any]()
        if order != sorted(order):
            more["order"] = order
        if tensor.dtype in COMPLEX:
            tensor, more["complex"] = torch.view_as_real(tensor), True
        name, _ = tensors.setdefault(id(item), (str(len(tensors)), tensor))
        return {_REFERENCE: name, **more}

    text = _bytes_tensor(json.dumps(value, default=plain_of, allow_nan=False).encode())
    _check_json(text)
    write_tensors(file, {_JSON: text, **dict(tensors.values())})


def to_bytes(value: Any) -> Tensor:
    """Return what `write` writes as a tensor of bytes. Raises what `write` raises."""
    file = io.BytesIO()
    write(file, value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def read(file: BinaryIO, kind: type[T], where: str) -> T:
    """Return what was written to an open file. Raises `BundleError` that begins with ``where`` and names the field."""

    def stored() -> dict[str, Tensor]:
        with safetensors.safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118

    return _read(stored, kind, where)


def from_bytes(data: Tensor, kind: type[T], where: str) -> T:
    """Return what `to_bytes` was given; otherwise as `read`."""

    return _read(lambda: read_tensors(bytes(_bytes_of(data))), kind, where)


def _read(stored: Callable[[], dict[str, Tensor]], kind: type[T], where: str) -> T:
    try:
        tensors = stored()
        text = tensors.pop(_JSON)
        _check_json(text)
        tree = _resolve(parse_json(bytes(_bytes_of(text))), tensors, {})
        return msgspec.convert(tree, kind, dec_hook=_instance, str_keys=True)
    except (OSError, MemoryError, *MALFORMED) as error:
        raise BundleError(
            f"{where} is refused: {type(error).__name__}: {first_line(error)[:300]}. Nothing of it was executed. It is "
            "damaged, hostile, or of another version of ddpstats."
        ) from None


def _check_json(text: Tensor) -> None:
    if text.numel() > _MAX_JSON_BYTES:
        raise ValueError(f"beside tensors it has {text.numel():,} bytes, and at most {_MAX_JSON_BYTES:,} are read")


def _resolve(tree: Any, stored: Mapping[str, Tensor], resolved: dict[str, Tensor]) -> Any:
    """Return the JSON with tensors in place of references."""
    if type(tree) is list:
        return [_resolve(item, stored, resolved) for item in tree]
    if type(tree) is not dict:
        return tree
    name = tree.get(_REFERENCE)
    if type(name) is not str:
        return {key: _resolve(item, stored, resolved) for key, item in tree.items()}
    if name not in resolved:
        tensor = torch.view_as_complex(stored[name]) if tree.get("complex") is True else stored[name]
        order = tree.get("order", range(tensor.dim()))
        resolved[name] = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    return resolved[name]


def _instance(kind: type, value: Any) -> Any:
    if kind is torch.dtype:
        value = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(value, kind):
        raise ValueError(f"Expected `{kind.__name__}`")
    return value


# -- a batch from plain values ----------------------------------------------------------------------------------------


def from_plain(plain: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return what `to_plain` was given; every tensor in it is a copy.

    ``device``: where tensors go that were on an accelerator; None leaves them on the CPU. ``dtype``: of the floating
    ones; None leaves them as they were. Raises `BundleError` for anything that `to_plain` does not write.
    """
    return _Rebuilding(device, dtype).rebuild(plain, "batch", 0)


class _Rebuilding:
    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._copies: dict[tuple[int, bool, bool], Tensor] = {}

    def rebuild(self, plain: Any, path: str, depth: int) -> Any:
        if depth > 2 * _MAX_DEPTH:
            raise BundleError(f"{path} is nested too deeply: it is damaged or hostile")
        if plain is None or type(plain) in (bool, int, float, str):
            return plain
        try:
            if type(plain) is list:
                return self._items(plain, path, depth)
            if plain["kind"] not in _KINDS:
                raise ValueError(f"kind {plain['kind']!r:.40} is not one that ddpstats writes")
            return _KINDS[plain["kind"]](self, plain, path, depth)
        except MALFORMED as error:
            raise BundleError(
                f"{path} is not what ddpstats writes: {type(error).__name__}: {first_line(error)[:200]}: it is "
                "damaged or hostile"
            ) from None

    def _items(self, items: list[Any], path: str, depth: int) -> list[Any]:
        return [self.rebuild(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]

    def _number(self, plain: dict[str, Any], path: str, depth: int) -> float | complex:
        text = str(plain["text"])
        return float(text) if plain["kind"] == "float" else complex(text)

    def _tensor(self, plain: dict[str, Any], path: str, depth: int) -> Tensor:
        data, accelerator, requires_grad = plain["data"], plain["accelerator"] is True, plain["requires_grad"] is True
        key = (id(data), accelerator, requires_grad)
        if key not in self._copies:
            dtype = self._dtype if data.is_floating_point() else None
            copy = data.to(self._device if accelerator else None, dtype, copy=True)
            self._copies[key] = copy.requires_grad_(requires_grad)
        return self._copies[key]

    def _bytes(self, plain: dict[str, Any], path: str, depth: int) -> bytes:
        return bytes(_bytes_of(plain["data"]))

    def _array(self, plain: dict[str, Any], path: str, depth: int) -> Any:
        try:
            import numpy
        except ImportError:
            raise BundleError(f"{path} is an array of numpy, which is not installed here: pip install numpy") from None
        array = numpy.frombuffer(_bytes_of(plain["data"]), dtype=str(plain["dtype"])).reshape(plain["shape"])
        return array if plain["kind"] == "array" else array[()]

    def _dict(self, plain: dict[str, Any], path: str, depth: int) -> dict[Any, Any]:
        rebuilt: dict[Any, Any] = {}
        for key, item in plain["items"]:
            name = self.rebuild(key, f"a key of {path}", depth + 1)
            rebuilt[name] = self.rebuild(item, f"{path}[{name!r:.80}]", depth + 1)
        return rebuilt

    def _tuple(self, plain: dict[str, Any], path: str, depth: int) -> tuple[Any, ...]:
        return tuple(self._items(plain["items"], path, depth))

    def _named_fields(self, plain: dict[str, Any], path: str, depth: int) -> Any:
        name, fields = plain["name"], plain["fields"]
        items = self._items(plain["items"], path, depth)
        if plain["kind"] == "packed":
            return PackedSequence(*items)
        if not all(type(text) is str and text.isidentifier() for text in (name, *fields)):
            raise ValueError("names that are no identifiers")
        if plain["kind"] == "object":
            return types.SimpleNamespace(**dict(zip(fields, items, strict=True)))
        # rename: a tuple made with it has fields such as _1, which are refused otherwise
        return collections.namedtuple(name, fields, rename=True)(*items)


_KINDS: dict[str, Callable[[_Rebuilding, dict[str, Any], str, int], Any]] = {
    **dict.fromkeys(("float", "complex"), _Rebuilding._number),
    "tensor": _Rebuilding._tensor,
    "bytes": _Rebuilding._bytes,
    **dict.fromkeys(("array", "scalar"), _Rebuilding._array),
    "dict": _Rebuilding._dict,
    "tuple": _Rebuilding._tuple,
    **dict.fromkeys(("packed", "namedtuple", "object"), _Rebuilding._named_fields),
}


def _bytes_of(data: Tensor) -> bytearray:
    if data.dtype is not torch.uint8 or data.dim() != 1:
        raise TypeError(f"bytes are expected, not {data.dtype} of shape {tuple(data.shape)}")
    return bytearray(bytes_in(data))
