"""Every rank's tree of tensors, on every rank: what the integrations build on where states are not just averaged.

The control lanes prove that all ranks gather; then come the lengths, then one padded all_gather; a tree that is much
larger than the others is broadcast instead. A tree travels exact and without pickle, as safetensors: its tensors, in
row-major order, and one with the JSON of the rest, in which they are named. `_rerun.codec` writes files so, too.

Whatever `decode` reads comes from another process: `ProtocolMismatch` where it is not what `encode` writes. Strides
stay behind: where kernels, and so the last bits, depend on them, the caller sends bytes of `_rerun.codec`.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import safetensors
import torch

from ddpstats._base import config
from ddpstats._base.files import parse_json
from ddpstats._base.paths import Index, Path
from ddpstats._base.text import dtype_name, first_line
from ddpstats._ranks.agreement import Agreement
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.comm import as_byte_tensor
from ddpstats._ranks.device import bytes_in
from ddpstats._ranks.exchange import GATHER, Call, Failure, InvalidLeaf, failure_of, refuse
from ddpstats.errors import InvalidStats


def gather_trees(tree: Any, *, name: str, group: Any = None, timeout_sec: float | None = None) -> list[Any]:
    """Return every rank's ``tree``, in the order of group ranks; the caller's own one is ``tree`` itself.

    Collective: every rank of ``group`` must call, with the same ``name``. Three collectives (two where all ranks hold
    the same), however many tensors there are and however ranks differ; one more for each tree that is much larger than
    most.

    Args:
        tree: dicts (keys str or int), lists and tuples of dense tensors (any shape and device), numbers, str, None; or
            a function without arguments that returns it, for what may fail on one rank.
        timeout_sec: how long to wait for the other ranks; None: DDPSTATS_TIMEOUT_SEC.

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
        assert isinstance(payload, bytes)
        parts = agreement.gather(payload)
        return [own if position == agreement.position else decode(part) for position, part in enumerate(parts)]

    try:
        return channel.run(work, timeout_sec or config.timeout_sec(None))
    except InvalidStats as error:
        raise error from cause


def _prepare(tree: Any) -> tuple[bytes | Failure, Any, BaseException | None]:
    """Return the bytes, the tree and no error; or a `Failure`: this rank must take part in any case."""
    try:
        own = tree() if callable(tree) else tree
        return encode(own), own, None
    except Exception as error:
        return failure_of(error), None, error.__cause__ if isinstance(error, InvalidLeaf) else error


# -- trees as bytes ---------------------------------------------------------------------------------------------------

_MAX_DEPTH = 100
_JSON = "json"


def encode(tree: Any) -> bytes:
    """Encode dicts (keys str or int), lists, tuples, dense tensors of any device, None, bool, int, float, str.

    Raises `InvalidLeaf`.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_describe(tree, (), tensors)).encode()
    file = io.BytesIO()
    write_tensors(file, {**tensors, _JSON: as_byte_tensor(bytearray(text))})
    return file.getvalue()


def decode(payload: bytes | bytearray | memoryview) -> Any:
    """Return what was encoded; tensors on the CPU, each with its own memory."""
    try:
        tensors = read_tensors(bytes(payload))
        tree = _build(parse_json(bytes(bytes_in(tensors.pop(_JSON))), strict=False), tensors, 0)
    except MALFORMED as error:
        refuse(f"a tree that it cannot have written ({type(error).__name__}: {first_line(error)[:200]})")
    if tensors:
        refuse(f"{len(tensors)} tensors too many")
    return tree


def _describe(value: Any, path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the JSON of ``value``; its tensors are added to ``tensors`` by the names that it has for them."""
    if len(path) > _MAX_DEPTH:
        raise InvalidLeaf(path, f"nested deeper than {_MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        if not can_store(value):
            kind = f"{value.layout}, {value.dtype}, on {value.device}"
            raise InvalidLeaf(path, f"a tensor ({kind}), which cannot be sent to other ranks")
        name, plain = str(len(tensors)), value.detach().resolve_conj().resolve_neg()
        tensors[name] = torch.view_as_real(plain) if plain.is_complex() else plain
        return ["complex" if plain.is_complex() else "tensor", name]
    if isinstance(value, dict):
        wrong = [key for key in value if type(key) not in (str, int)]
        if wrong:
            raise InvalidLeaf(path, f"key {wrong[0]!r} is of type {type(wrong[0]).__name__}, not str or int")
        return ["dict", [*value], [_describe(item, (*path, key), tensors) for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_describe(item, (*path, Index(index)), tensors) for index, item in enumerate(value)]]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InvalidLeaf(path, f"of type {type(value).__name__}, which cannot be sent to other ranks")


def _build(node: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Return what `_describe` described. Raises one of `MALFORMED` for what it cannot have returned."""

    def build_all(nodes: list[Any]) -> list[Any]:
        return [_build(below, tensors, depth + 1) for below in nodes]

    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    match node:
        case None | bool() | int() | float() | str():
            return node
        case ["tensor", str(name)]:
            return tensors.pop(name)
        case ["complex", str(name)]:
            return torch.view_as_complex(tensors.pop(name))
        case ["list", [*nodes]]:
            return build_all(nodes)
        case ["tuple", [*nodes]]:
            return tuple(build_all(nodes))
        case ["dict", [*keys], [*nodes]] if {*map(type, keys)} <= {str, int} and len({*keys}) == len(keys):
            return dict(zip(keys, build_all(nodes), strict=True))
    raise ValueError("neither a plain value nor a tensor, list, tuple or dict")


# -- tensors as bytes -------------------------------------------------------------------------------------------------

# As safetensors spells them: "F32", "BF16", "I64", "U8", "BOOL", "F8_E4M3".
DTYPE_NAMES = {
    dtype: dtype_name(dtype).upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I").removesuffix("FN")
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Written as pairs of floats: not each version of safetensors has a name for them.
COMPLEX = (torch.complex64, torch.complex128)
# What reading raises of bytes that we have not written.
MALFORMED = (
    *(safetensors.SafetensorError, LookupError, ValueError, TypeError, RuntimeError),
    *(ArithmeticError, AttributeError, AssertionError),
)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie in memory of the tensor's own: not so where another tensor holds them."""
    is_strided = tensor.layout is torch.strided and tensor.device.type != "meta"
    is_plain = is_strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and (tensor.numel() == 0 or tensor.data_ptr() != 0)


def can_store(tensor: torch.Tensor) -> bool:
    """Return whether the tensor can be written, as pairs of floats where it is complex."""
    # torch makes larger ones as views alone; an empty dimension counts as 1
    is_readable = math.prod(size or 1 for size in tensor.shape) <= 1 << 62
    return is_readable and is_ordinary(tensor) and (tensor.dtype in DTYPE_NAMES or tensor.dtype in COMPLEX)


def write_tensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors that `can_store`, one after another; those of a device go to the host one at a time."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    head = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(head)) + head)
    for tensor in tensors.values():
        file.write(bytes_in(tensor.cpu()))


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in untrusted bytes, each with its own memory. Raises one of `MALFORMED`."""
    tensors = {}
    for name, view in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
        dtype, raw = _DTYPES[view["dtype"]], view["data"]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(view["shape"], dtype=dtype, device="cpu")
        tensors[name] = flat.view(view["shape"])
    return tensors
