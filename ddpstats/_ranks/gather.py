"""Every rank's tree of tensors, on every rank: what the integrations build on where states are not just averaged.

The control lanes prove that all ranks gather; then come the lengths, then one padded all_gather; a tree that is much
larger than the others is broadcast instead. A tree travels exact and without pickle::

    8 bytes         length of the head
    head            JSON: the structure, plain values as they are, tensors as dtype and shape
    for each tensor its elements in row-major order, starting at a multiple of 16 bytes

Whatever `decode` reads comes from another process: `ProtocolMismatch` where it is not exactly what `encode` writes.
Strides stay behind: where kernels, and so the last bits, depend on them, the caller sends bytes of `_rerun.codec`.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch

from ddpstats._base import config
from ddpstats._base.files import parse_json
from ddpstats._base.paths import Index, Path, Step
from ddpstats._base.text import dtype_name
from ddpstats._ranks.agreement import Agreement
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.exchange import GATHER, Call, Failure, InvalidLeaf, failure_of, refuse
from ddpstats.errors import InvalidStats


def gather_trees(tree: Any, *, name: str, group: Any = None) -> list[Any]:
    """Return every rank's ``tree``, in the order of group ranks; the caller's own one is ``tree`` itself.

    Collective: every rank of ``group`` must call, with the same ``name``. Three collectives (two where all ranks hold
    the same), however many tensors there are and however ranks differ; one more for each tree that is much larger than
    the others.

    Args:
        tree: dicts (keys str or int), lists and tuples of dense tensors (any shape and device), numbers, str, None; or
            a function without arguments that returns it, for what may fail on one rank.

    Returns:
        Tensors of other ranks are on the CPU, without grad; tuples and dicts of subclasses are plain ones.

    Raises:
        InvalidStats: some rank's tree holds a value that cannot be sent, or could not be made; on every rank.
        ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
    """
    channel = channel_of(group)
    payload, own, cause = _prepare(tree)
    call = Call(GATHER, name, "")

    def work(agreement: Agreement) -> list[Any]:
        agreement.ask(call, payload if isinstance(payload, Failure) else ())
        assert isinstance(payload, bytearray)
        parts = agreement.gather(payload)
        return [own if position == agreement.position else decode(part) for position, part in enumerate(parts)]

    try:
        return channel.run(work, config.timeout_sec(None))
    except InvalidStats as error:
        raise error from cause


def _prepare(tree: Any) -> tuple[bytearray | Failure, Any, BaseException | None]:
    """Return the bytes, the tree and no error; or a `Failure`: this rank must take part in any case."""
    try:
        own = tree() if callable(tree) else tree
        return encode(own), own, None
    except Exception as error:
        return failure_of(error), None, error.__cause__ if isinstance(error, InvalidLeaf) else error


# -- as bytes ---------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<Q")
_ALIGN = 16
_MAX_DEPTH = 200
_MAX_DIMENSIONS = 1000
_MAX_ELEMENTS = 1 << 58
_TOO_LARGE = f"which cannot be sent to other ranks: it has more than {_MAX_DIMENSIONS} dimensions or too many elements"
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(tree: Any) -> bytearray:
    """Encode dicts (keys str or int), lists, tuples, dense tensors of any device, None, bool, int, float, str.

    Raises `InvalidLeaf`.
    """
    tensors: list[torch.Tensor] = []
    head = json.dumps(_describe(tree, (), tensors)).encode()
    start = _LENGTH.pack(len(head)) + head
    start = start.ljust(_align(len(start)), b"\0")
    raw = list(map(_raw, tensors))
    out, at = bytearray(len(start) + sum(_align(part.numel()) for part in raw)), len(start)
    out[:at] = start
    for part in raw:
        if part.numel():
            torch.frombuffer(out, dtype=torch.uint8, offset=at, count=part.numel()).copy_(part)
        at += _align(part.numel())
    return out


def can_encode(tensor: torch.Tensor) -> bool:
    """Return whether `encode` takes this tensor."""
    return tensor.layout == torch.strided and tensor.dtype in _NAMES and not tensor.is_meta


def decode(payload: bytes | bytearray | memoryview) -> Any:
    """Return what was encoded; tensors on the CPU, each with its own memory."""
    if len(payload) < _LENGTH.size or _LENGTH.unpack_from(payload)[0] > len(payload) - _LENGTH.size:
        refuse("a head that ends too early")
    (length,) = _LENGTH.unpack_from(payload)
    try:
        node = parse_json(bytes(payload[_LENGTH.size : _LENGTH.size + length]), strict=False)
    except ValueError:
        refuse("a head that is not JSON")
    reader = _Tensors(payload, _align(_LENGTH.size + length))
    tree = _build(node, reader, 0)
    if reader.at != len(payload):
        refuse(f"{len(payload) - reader.at} bytes too many")
    return tree


def _describe(value: Any, path: Path, tensors: list[torch.Tensor]) -> Any:
    """Return the head of ``value``; its tensors are appended in the order in which they occur."""
    if len(path) > _MAX_DEPTH:
        raise InvalidLeaf(path, f"nested deeper than {_MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        tensors.append(_dense(value, path))
        return ["tensor", _NAMES[value.dtype], list(value.shape)]
    if isinstance(value, dict):
        wrong = [key for key in value if type(key) not in (str, int)]
        if wrong:
            raise InvalidLeaf(path, f"key {wrong[0]!r} is of type {type(wrong[0]).__name__}, not str or int")
        return ["dict", [[key, _describe(item, (*path, key), tensors)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_describe(item, (*path, Index(index)), tensors) for index, item in enumerate(value)]]
    if _is_plain(value):
        return ["value", value]
    raise InvalidLeaf(path, f"of type {type(value).__name__}, which cannot be sent to other ranks")


def _dense(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    if not can_encode(tensor):
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
        raise InvalidLeaf(path, f"a tensor ({kind}), which cannot be sent to other ranks")
    if not _is_shape(list(tensor.shape)):
        raise InvalidLeaf(path, f"a tensor of shape {str(list(tensor.shape))[:80]}, {_TOO_LARGE}")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return (plain if plain.is_cpu else plain.cpu()).contiguous()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor: a view. One element may have any stride and count as contiguous."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Tensors:
    """The tensors of a payload, one after another; every length is checked against what is left."""

    def __init__(self, payload: bytes | bytearray | memoryview, at: int) -> None:
        self._payload, self.at = payload, at

    def take(self, name: Any, shape: Any) -> torch.Tensor:
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not _is_shape(shape):
            refuse(f"a tensor of dtype {str(name)[:40]!r} and shape {str(shape)[:80]}")
        size = math.prod(shape) * dtype.itemsize
        start, self.at = self.at, _align(self.at + size)
        if self.at > len(self._payload):
            refuse("tensors that end too early")
        if size == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(self._payload[start : start + size]), dtype=dtype).reshape(shape)


def _is_shape(shape: Any) -> bool:
    """Return whether torch can count the elements, also of a shape without any."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        return False
    return all(type(n) is int and n >= 0 for n in shape) and math.prod(n or 1 for n in shape) <= _MAX_ELEMENTS


def _build(node: Any, tensors: _Tensors, depth: int) -> Any:
    if not isinstance(node, list) or not node or depth > _MAX_DEPTH + 1:
        refuse("a structure that it cannot have written")
    kind, *rest = node
    if kind == "tensor" and len(rest) == 2:
        return tensors.take(*rest)
    if kind == "value" and len(rest) == 1 and _is_plain(rest[0]):
        return rest[0]
    if kind in ("list", "tuple") and len(rest) == 1 and isinstance(rest[0], list):
        items = [_build(item, tensors, depth + 1) for item in rest[0]]
        return items if kind == "list" else tuple(items)
    if kind != "dict" or len(rest) != 1 or not isinstance(rest[0], list):
        refuse(f"a {str(kind)[:20]!r} that it cannot have written")
    built = {_key(item): _build(item[1], tensors, depth + 1) for item in rest[0]}
    if len(built) != len(rest[0]):
        refuse("a dict with one key twice")
    return built


def _key(item: Any) -> Step:
    if not isinstance(item, list) or len(item) != 2 or type(item[0]) not in (str, int):
        refuse("a dict whose items are not keys and values")
    key: Step = item[0]
    return key


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _align(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
